// Meetings and proposals; the steps of the collectives are in shm_steps.cpp.
#include "shm_group.h"

#include <algorithm>

#include "shm_staging.h"

namespace hpdl {

std::size_t ShmGroup::nbytes_for(int size) {
    // An outbox beside the inboxes of all ranks, everything twice.
    return size * sizeof(Seat) + 2 * (static_cast<std::size_t>(size) + 1) * kChunk;
}

ShmGroup::ShmGroup(std::shared_ptr<SharedMemory> memory, int rank, int size)
    : memory_(std::move(memory)), seats_(reinterpret_cast<Seat*>(memory_->data())), rank_(rank), size_(size) {
    static_assert(sizeof(Cell) == 4096, "a cell is a page");
    if (size > kMaxRanks) throw std::invalid_argument("more than 1,024 ranks on one machine");
}

void ShmGroup::add(std::shared_ptr<SharedMemory> memory, std::size_t part) {
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
        const std::ptrdiff_t offset = x.data - (segment.memory->data() + rank_ * segment.part);
        if (offset >= 0 && offset + x.nbytes() <= segment.part) return {call, offset, static_cast<std::int32_t>(i)};
    }
    return {call, 0, -1};
}

char* ShmGroup::shared_tensor_of(int rank) const {
    const Proposal& proposal = proposal_of(rank);
    const Segment& segment = segments_[proposal.segment];
    return segment.memory->data() + rank * segment.part + proposal.offset;
}

void ShmGroup::start(const char* name, const Buffer& x, const Buffer& out, int root, Step step, int steps) {
    if (step_ != steps_) throw std::runtime_error("an earlier collective did not complete: the ranks are out of step");
    x_ = x;
    out_ = out;
    root_ = root;
    step_function_ = step;
    steps_ = steps;
    reduced_ = 0;
    staged_from_ = 0;
    first_meeting_ = meetings_ + 1;
    seats_[rank_].cells[first_meeting_ & 1].proposal = propose(Call::of(name, x.count, x.dtype, root), x);
    step_ = 0;
    (this->*step_function_)(step_++);
    come_to_meeting();
}

void ShmGroup::start_meeting(const Call& call) {
    start(call.name, Buffer{nullptr, static_cast<std::size_t>(call.count), call.dtype}, {}, call.root, &ShmGroup::rest,
          2);
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
    std::vector<Call> calls;
    for (int r = 0; r < size_; r++) calls.push_back(proposal_of(r).call);
    require_agreement(calls);
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
