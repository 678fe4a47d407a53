#include "arrival.h"

namespace hpdl {

Arrival::Arrival(const Group& group, const std::vector<int>& ranks, int number)
    : group_(group), first_(ranks[0] == group.rank), here_(2 * number), gone_(2 * number + 1) {
    if (first_) {
        others_.assign(ranks.begin() + 1, ranks.end());
    } else {
        others_ = {ranks[0]};
        send(ranks[0], here_);
    }
    heard_.resize(others_.size(), group.mpi->constants.request_null);
    for (std::size_t i = 0; i < others_.size(); i++) receive(others_[i], here_, &heard_[i]);
}

Arrival::~Arrival() {
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
    sent_.push_back(mpi.constants.request_null);
    mpi.check(mpi.Isend(nullptr, 0, mpi.constants.byte, to, tag, group_.comm, &sent_.back()), "MPI_Isend");
}

void Arrival::receive(int source, int tag, Handle* request) {
    const Mpi& mpi = *group_.mpi;
    mpi.check(mpi.Irecv(nullptr, 0, mpi.constants.byte, source, tag, group_.comm, request), "MPI_Irecv");
}

// A request that was done before is null, for which MPI_Test is true.
bool Arrival::is_done(Handle* request, const char* call) {
    Status status{};
    int done = 0;
    group_.mpi->check(group_.mpi->Test(request, &done, &status), call);
    return done;
}

// Has `rank` said "gone" since it said "here"? The message is received, as it must not meet a later arrival.
bool Arrival::took_it_back(int rank) {
    Status status{};
    int found = 0;
    group_.mpi->check(group_.mpi->Iprobe(rank, gone_, group_.comm, &found, &status), "MPI_Iprobe");
    if (!found) return false;
    Handle request = group_.mpi->constants.request_null;
    receive(rank, gone_, &request);
    while (!is_done(&request, "MPI_Irecv")) {
    }
    return true;
}

bool Arrival::advance() {
    if (!told_) {
        for (Handle& request : heard_) {
            if (!is_done(&request, "MPI_Irecv")) return false;
        }
        bool all_here = true;
        for (std::size_t i = 0; first_ && i < others_.size(); i++) {
            if (!took_it_back(others_[i])) continue;
            receive(others_[i], here_, &heard_[i]);
            all_here = false;
        }
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
