#include "arrival.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hpdl {

namespace {

constexpr int kNumbers = kLargestTag / 2;  // two tags each; kLargestTag itself is comm/status/remote.py's

void require_members(const Group& group, const std::vector<int>& ranks) {
    const bool known = std::all_of(ranks.begin(), ranks.end(), [&](int r) { return r >= 0 && r < group.size; });
    if (known && std::count(ranks.begin(), ranks.end(), group.rank) == 1) return;
    throw std::invalid_argument("an arrival of rank " + std::to_string(group.rank) + " of " +
                                std::to_string(group.size) + " needs ranks of these, itself once");
}

}  // namespace

Arrival::Arrival(const Group& group, const std::vector<int>& ranks, int number) : group_(group) {
    require_members(group, ranks);
    if (number < 0 || number >= kNumbers) throw std::invalid_argument("no arrival " + std::to_string(number));
    first_ = ranks[0] == group.rank;
    here_ = 2 * number;
    gone_ = here_ + 1;
    if (first_) {
        others_.assign(ranks.begin() + 1, ranks.end());
    } else {
        others_ = {ranks[0]};
        send(ranks[0], here_);
    }
    heard_.resize(others_.size(), group.mpi->constants.request_null);
    taken_back_.resize(others_.size(), false);
    for (std::size_t i = 0; i < others_.size(); i++) receive(others_[i], here_, &heard_[i]);
}

Arrival::~Arrival() {
    if (group_.mpi->is_over()) return;  // as when Python forgets its last objects
    for (Handle& request : heard_) {
        Status status{};
        int done = 0;
        if (group_.mpi->Test(&request, &done, &status) != 0 || done) continue;
        group_.mpi->Cancel(&request);
        group_.mpi->Test(&request, &done, &status);
    }
}

void Arrival::send(int to, int tag) {
    const Mpi& mpi = *group_.mpi;
    mpi.require_tag(tag);
    sent_.push_back(mpi.constants.request_null);
    mpi.check(mpi.Isend(nullptr, 0, mpi.constants.byte, to, tag, group_.comm, &sent_.back()), "MPI_Isend");
}

void Arrival::receive(int source, int tag, Handle* request) {
    const Mpi& mpi = *group_.mpi;
    mpi.require_tag(tag);
    mpi.check(mpi.Irecv(nullptr, 0, mpi.constants.byte, source, tag, group_.comm, request), "MPI_Irecv");
}

// A request that was done before is null, for which MPI_Test is true.
bool Arrival::is_done(Handle* request, const char* call) {
    Status status{};
    int done = 0;
    group_.mpi->check(group_.mpi->Test(request, &done, &status), call);
    return done;
}

// Other rank i has said "here", and not "gone" since: that message is received, as it must not meet a later arrival.
bool Arrival::is_here(std::size_t i) {
    if (!is_done(&heard_[i], "MPI_Irecv")) return false;
    if (!first_) return true;
    if (taken_back_[i]) {  // and once more from the beginning
        taken_back_[i] = false;
        receive(others_[i], here_, &heard_[i]);
        return false;
    }
    Status status{};
    int found = 0;
    group_.mpi->check(group_.mpi->Iprobe(others_[i], gone_, group_.comm, &found, &status), "MPI_Iprobe");
    if (!found) return true;
    taken_back_[i] = true;
    receive(others_[i], gone_, &heard_[i]);
    return false;
}

bool Arrival::advance() {
    if (!told_) {
        bool all_here = true;
        for (std::size_t i = 0; i < others_.size(); i++) all_here = is_here(i) && all_here;
        if (!all_here) return false;
        for (std::size_t i = 0; first_ && i < others_.size(); i++) send(others_[i], here_);
        told_ = true;
        progress_++;
    }
    for (Handle& request : sent_) {
        if (!is_done(&request, "MPI_Isend")) return false;
    }
    return true;
}

bool Arrival::give_up(double seconds) {
    if (!told_ && !first_) {
        send(others_[0], gone_);
        wait(*this, seconds, 0, true);
    }
    return told_;
}

}  // namespace hpdl
