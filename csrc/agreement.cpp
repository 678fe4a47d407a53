#include "agreement.h"

#include <algorithm>
#include <cstring>

namespace hpdl {

Call Call::of(const char* name, std::size_t count, DType dtype, int root) {
    Call call{};
    std::strncpy(call.name, name, sizeof call.name - 1);
    call.count = static_cast<std::int64_t>(count);
    call.root = root;
    call.dtype = dtype;
    return call;
}

std::string Call::text() const {
    std::string text = name;
    if (count > 0) text += " of " + describe(static_cast<std::size_t>(count), dtype);
    const bool gathers = !std::strcmp(name, "gather") || !std::strcmp(name, "reduce");
    if (root >= 0) text += (gathers ? " to rank " : " from rank ") + std::to_string(root);
    return text;
}

void require_agreement(const std::vector<Call>& calls) {
    if (std::all_of(calls.begin(), calls.end(), [&](const Call& call) { return call == calls[0]; })) return;
    std::string text = "the ranks disagree: ";
    for (std::size_t first = 0; first < calls.size();) {
        std::size_t last = first;
        while (last + 1 < calls.size() && calls[last + 1] == calls[first]) last++;
        text += first ? "; rank" : "rank";
        text += first == last ? " " + std::to_string(first) + " calls "
                              : "s " + std::to_string(first) + "-" + std::to_string(last) + " call ";
        text += calls[first].text();
        first = last + 1;
    }
    throw std::invalid_argument(text);
}

Agreement::Agreement(const Group& group, const Call& call, const std::string& note)
    : group_(group), all_(group.size), request_(group.mpi->constants.request_null) {
    if (note.size() > kNote)
        throw std::invalid_argument("a note of " + std::to_string(note.size()) + " bytes is too long");
    mine_.call = call;
    mine_.note_nbytes = static_cast<std::uint32_t>(note.size());
    std::memcpy(mine_.note, note.data(), note.size());
}

void Agreement::post() {
    const Handle byte = group_.mpi->constants.byte;
    group_.mpi->check(
        group_.mpi->Iallgather(&mine_, sizeof mine_, byte, all_.data(), sizeof mine_, byte, group_.comm, &request_),
        "MPI_Iallgather");
    posted_ = true;
}

bool Agreement::advance() {
    if (!posted_) post();
    Status status{};
    int done = 0;
    group_.mpi->check(group_.mpi->Test(&request_, &done, &status), "MPI_Iallgather");
    if (!done) return false;
    calls_.clear();
    for (const Entry& entry : all_) calls_.push_back(entry.call);
    require_agreement(calls_);
    return true;
}

std::vector<std::string> Agreement::notes() const {
    std::vector<std::string> notes;
    for (const Entry& entry : all_) notes.emplace_back(entry.note, entry.note_nbytes);
    return notes;
}

Duplicates::Duplicates(const Mpi& mpi, Handle comm)
    : mpi_(&mpi), comms_{comm, 0, 0}, request_(mpi.constants.request_null) {
    mpi.check(mpi.Comm_idup(comms_[0], &comms_[1], &request_), "MPI_Comm_idup");
}

bool Duplicates::advance() {
    Status status{};
    int done = 0;
    mpi_->check(mpi_->Test(&request_, &done, &status), "MPI_Comm_idup");
    if (!done) return false;
    if (++made_ == 2) return true;
    mpi_->check(mpi_->Comm_idup(comms_[1], &comms_[2], &request_), "MPI_Comm_idup");
    return false;
}

}  // namespace hpdl
