// Meetings and proposals; the steps of the collectives are in shm_steps.cpp.
#include "shm_group.h"

#include <algorithm>

#include "shm_staging.h"

namespace hpdl {

std::size_t ShmGroup::nbytes_for(int size) {
    if (size < 1 || size > kMaxRanks)
        throw std::invalid_argument(std::to_string(size) + " ranks on one machine: from 1 to 1,024 can share memory");
    // An outbox beside the inboxes of all ranks, everything twice.
    return size * sizeof(Seat) + 2 * (static_cast<std::size_t>(size) + 1) * kChunk;
}

ShmGroup::ShmGroup(std::shared_ptr<SharedMemory> memory, int rank, int size)
    : memory_(std::move(memory)), seats_(nullptr), rank_(rank), size_(size) {
    static_assert(sizeof(Cell) == 4096, "a cell is a page");
    if (rank < 0 || rank >= size)
        throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size));
    if (!memory_ || memory_->nbytes() < nbytes_for(size))
        throw std::invalid_argument(std::to_string(size) + " ranks need " + std::to_string(nbytes_for(size)) +
                                    " bytes of shared memory");
    seats_ = reinterpret_cast<Seat*>(memory_->data());
}

void ShmGroup::add(std::shared_ptr<SharedMemory> memory, std::size_t part) {
    if (!memory || memory->nbytes() / size_ < part)
        throw std::invalid_argument(std::to_string(size_) + " parts of " + std::to_string(part) +
                                    " bytes need shared memory of that size");
    segments_.push_back({std::move(memory), part});
}

char* ShmGroup::inbox(int rank, int chunk) const {
    char* staging = reinterpret_cast<char*>(seats_ + size_);
    return staging + (2 * static_cast<std::size_t>(rank) + ((chunks_ + chunk) & 1)) * kChunk;
}

char* ShmGroup::outbox(int chunk) const { return inbox(size_, chunk); }

ShmGroup::Proposal ShmGroup::propose(const Call& call, const Buffer& x) const {
    for (std::size_t i = 0; i < segments_.size(); i++) {
        const Segment& segment = segments_[i];
        const auto begin = reinterpret_cast<std::uintptr_t>(segment.memory->data() + rank_ * segment.part);
        const auto at = reinterpret_cast<std::uintptr_t>(x.data);
        if (at >= begin && at - begin <= segment.part && x.nbytes() <= segment.part - (at - begin))
            return {call, static_cast<std::int64_t>(at - begin), static_cast<std::int32_t>(i)};
    }
    return {call, 0, -1};
}

char* ShmGroup::shared_tensor_of(int rank) const {
    const Proposal& proposal = proposal_of(rank);
    const Segment& segment = segments_[proposal.segment];
    return segment.memory->data() + rank * segment.part + proposal.offset;
}

void ShmGroup::start(const Call& call, const Buffer& x, const Buffer& out, Step step, int steps) {
    if (step_ != steps_) throw std::runtime_error("an earlier collective did not complete: the ranks are out of step");
    x_ = x;
    out_ = out;
    root_ = call.root;
    step_function_ = step;
    steps_ = steps;
    calls_.clear();
    reduced_ = 0;
    staged_from_ = 0;
    first_meeting_ = meetings_ + 1;
    seats_[rank_].cells[first_meeting_ & 1].proposal = propose(call, x);
    step_ = 0;
    (this->*step_function_)(step_++);
    come_to_meeting();
}

void ShmGroup::start_meeting(const Call& call) {
    start(call, Buffer{nullptr, static_cast<std::size_t>(call.count), call.dtype}, {}, &ShmGroup::rest, 2);
}

bool ShmGroup::rest(int) { return true; }

void ShmGroup::come_to_meeting() {
    meetings_++;
    present_ = 0;
    // Release: whoever sees the number sees everything that this rank has written before.
    seats_[rank_].cells[meetings_ & 1].meeting.store(meetings_, std::memory_order_release);
}

bool ShmGroup::everyone_came() {
    for (; present_ < size_; present_++) {
        if (seats_[present_].cells[meetings_ & 1].meeting.load(std::memory_order_acquire) < meetings_) return false;
    }
    return true;
}

std::vector<int> ShmGroup::missing() const {
    std::vector<int> ranks;
    for (int r = 0; r < size_; r++) {
        if (seats_[r].cells[meetings_ & 1].meeting.load(std::memory_order_acquire) < meetings_) ranks.push_back(r);
    }
    return ranks;
}

void ShmGroup::require_same_calls() {
    const Call& mine = proposal_of(rank_).call;
    bool same = true;
    for (int r = 0; r < size_; r++) same = same && proposal_of(r).call == mine;
    if (same) return;
    steps_ = step_;  // this collective is over, on every rank alike
    for (int r = 0; r < size_; r++) calls_.push_back(proposal_of(r).call);
    require_agreement(calls_);
}

bool ShmGroup::advance() {
    if (step_ == steps_) return true;
    // One step for each call, so that whoever waits looks at his clock between the steps of a long collective.
    if (!everyone_came()) return false;
    if (step_ == 1 && reduced_ == 0) require_same_calls();
    if (!(this->*step_function_)(step_)) return false;
    progress_++;
    if (++step_ == steps_) return true;
    come_to_meeting();
    return false;
}

}  // namespace hpdl
