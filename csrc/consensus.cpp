#include "consensus.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hpdl {

// -- consensus -------------------------------------------------------------------------------------------------------

Consensus::Consensus(const Group& group, const Call& call, const std::string& note)
    : group_(group), all_(group.size), request_(group.mpi->constants.request_null) {
    if (note.size() > kNote)
        throw std::invalid_argument("a note of " + std::to_string(note.size()) + " bytes is too long");
    mine_.call = call;
    mine_.note_nbytes = static_cast<std::uint32_t>(note.size());
    std::memcpy(mine_.note, note.data(), note.size());
}

void Consensus::post() {
    const Handle byte = group_.mpi->constants.byte;
    group_.mpi->check(
        group_.mpi->Iallgather(&mine_, sizeof mine_, byte, all_.data(), sizeof mine_, byte, group_.comm, &request_),
        "MPI_Iallgather");
    posted_ = true;
}

bool Consensus::advance() {
    if (!posted_) post();
    if (!group_.mpi->is_done(request_, "MPI_Iallgather")) return false;
    calls_.clear();
    for (const Entry& entry : all_) calls_.push_back(entry.call);
    require_consensus(calls_);
    return true;
}

std::vector<std::string> Consensus::notes() const {
    std::vector<std::string> notes;
    for (const Entry& entry : all_) notes.emplace_back(entry.note, entry.note_nbytes);
    return notes;
}

// -- duplicates ------------------------------------------------------------------------------------------------------

Duplicates::Duplicates(const Mpi& mpi, Handle comm)
    : mpi_(&mpi), comms_{comm, 0, 0}, request_(mpi.constants.request_null) {
    mpi.check(mpi.Comm_idup(comms_[0], &comms_[1], &request_), "MPI_Comm_idup");
}

bool Duplicates::advance() {
    if (!mpi_->is_done(request_, "MPI_Comm_idup")) return false;
    if (++made_ == 2) return true;
    mpi_->check(mpi_->Comm_idup(comms_[1], &comms_[2], &request_), "MPI_Comm_idup");
    return false;
}

// -- rendezvous ------------------------------------------------------------------------------------------------------

namespace {

constexpr int kNumbers = kLargestTag / 2;  // two tags each; kLargestTag itself is comm/status/remote.py's

void require_members(const Group& group, const std::vector<int>& ranks) {
    const bool known = std::all_of(ranks.begin(), ranks.end(), [&](int r) { return r >= 0 && r < group.size; });
    if (known && std::count(ranks.begin(), ranks.end(), group.rank) == 1) return;
    throw std::invalid_argument("a rendezvous of rank " + std::to_string(group.rank) + " of " +
                                std::to_string(group.size) + " needs ranks of these, itself once");
}

}  // namespace

Rendezvous::Rendezvous(const Group& group, const std::vector<int>& ranks, int number) : group_(group) {
    require_members(group, ranks);
    if (number < 0 || number >= kNumbers) throw std::invalid_argument("no rendezvous " + std::to_string(number));
    first_ = ranks[0] == group.rank;
    here_ = 2 * number;
    gone_ = here_ + 1;
    if (first_) {
        others_.assign(ranks.begin() + 1, ranks.end());
    } else {
        others_ = {ranks[0]};
        send(ranks[0], here_);
    }
    receives_.resize(others_.size(), group.mpi->constants.request_null);
    withdrawn_.resize(others_.size(), false);
    for (std::size_t i = 0; i < others_.size(); i++) receive(i, here_);
}

Rendezvous::~Rendezvous() {
    if (!group_.mpi->is_over()) cancel_receives();  // it is when Python drops its last objects
}

void Rendezvous::cancel_receives() {
    for (Handle& request : receives_) {
        Status status{};
        int done = 0;
        if (group_.mpi->Test(&request, &done, &status) != 0 || done) continue;
        group_.mpi->Cancel(&request);
        group_.mpi->Test(&request, &done, &status);
    }
}

void Rendezvous::send(int dst, int tag) { sends_.push_back(group_.mpi->send(nullptr, 0, dst, tag, group_.comm)); }

void Rendezvous::receive(std::size_t i, int tag) {
    receives_[i] = group_.mpi->receive(nullptr, 0, others_[i], tag, group_.comm);
}

// Other rank i has said "here", and not "gone" since: that message is received, as a later rendezvous must not find it.
bool Rendezvous::is_present(std::size_t i) {
    if (!group_.mpi->is_done(receives_[i], "MPI_Irecv")) return false;
    if (!first_) return true;
    if (withdrawn_[i]) {  // and once more from the beginning
        withdrawn_[i] = false;
        receive(i, here_);
        return false;
    }
    Status status{};
    int found = 0;
    group_.mpi->check(group_.mpi->Iprobe(others_[i], gone_, group_.comm, &found, &status), "MPI_Iprobe");
    if (!found) return true;
    withdrawn_[i] = true;
    receive(i, gone_);
    return false;
}

bool Rendezvous::advance() {
    if (!released_) {
        bool all_present = true;
        for (std::size_t i = 0; i < others_.size(); i++) all_present = is_present(i) && all_present;
        if (!all_present) return false;
        for (std::size_t i = 0; first_ && i < others_.size(); i++) send(others_[i], here_);
        released_ = true;
        progress_++;
    }
    for (Handle& request : sends_) {
        if (!group_.mpi->is_done(request, "MPI_Isend")) return false;
    }
    return true;
}

bool Rendezvous::give_up(double seconds) {
    if (!released_ && !first_) {
        send(others_[0], gone_);
        wait(*this, seconds, 0, true);
        if (!released_) cancel_receives();  // now: the "go" of another rendezvous with this number is not for this one
    }
    return released_;
}

}  // namespace hpdl
