// The steps of all_reduce: small, in shared memory, or anywhere. Step 0 comes before the first meeting: it may write to
// this rank's cell and inbox only.
#include <cstring>

#include "reduce.h"
#include "shm_group.h"
#include "shm_staging.h"

namespace hpdl {

namespace {

constexpr std::size_t kReduceAtOnce = std::size_t{4} << 20;  // bytes, some 1 ms: between two looks at signals

}  // namespace

void ShmGroup::start_all_reduce(const Buffer& x) {
    require_aligned(x, "all_reduce");
    start(Call::of("all_reduce", x.count, x.dtype), x, {},
          x.nbytes() <= sizeof(Cell::note) ? &ShmGroup::reduce_notes : &ShmGroup::all_reduce, 2);
}

// Small: everybody adds everything. One meeting.
bool ShmGroup::reduce_notes(int step) {
    if (step == 0) {
        copy(seats_[rank_].cells[first_meeting_ & 1].note, x_.data, x_.nbytes());
        return true;
    }
    char* notes[kMaxRanks];
    for (int r = 0; r < size_; r++) notes[r] = seats_[r].cells[first_meeting_ & 1].note;
    loops().sum(x_.dtype, notes, size_, &x_.data, 1, x_.count);
    return true;
}

// Large: where the tensors are is known after the first meeting, and decides how to go on.
bool ShmGroup::all_reduce(int step) {
    const Step staged = size_ == 2 ? &ShmGroup::reduce_in_pair : &ShmGroup::reduce_staged;
    if (step == 0) return proposal_of(rank_).segment >= 0 || (this->*staged)(0);
    int shared = 0;
    for (int r = 0; r < size_; r++) shared += proposal_of(r).segment >= 0;
    if (shared == size_) {
        step_function_ = &ShmGroup::reduce_shared;
        steps_ = 3;
    } else {
        step_function_ = staged;
        staged_from_ = shared > 0;  // those whose tensors are shared have not staged anything yet: all begin again
        steps_ = staged_from_ + chunks_in(x_.count, kChunk / item_size(x_.dtype)) + (size_ == 2 ? 1 : 2);
    }
    return (this->*step_function_)(step);
}

// In shared memory: each rank loads one slice from all tensors, adds in registers, and stores to all tensors.
bool ShmGroup::reduce_shared(int step) {
    if (step == 2) return true;
    const std::size_t item = item_size(x_.dtype);
    const Range slice = part_of(x_.count, size_, rank_, item);
    const std::size_t count = std::min(slice.count() - reduced_, kReduceAtOnce / item);
    char* tensors[kMaxRanks];
    for (int r = 0; r < size_; r++) tensors[r] = shared_tensor_of(r) + (slice.begin + reduced_) * item;
    loops().sum(x_.dtype, tensors, size_, tensors, size_, count);
    reduced_ += count;
    return reduced_ == slice.count();
}

// Anywhere, two ranks: each copies its chunk for the other and adds the other's. One meeting per chunk, while the way
// below needs one more and moves as much.
bool ShmGroup::reduce_in_pair(int step) {
    const int now = step - staged_from_;
    const std::size_t item = item_size(x_.dtype), each = kChunk / item;
    const int chunks = chunks_in(x_.count, each);
    if (now < chunks) {
        const Range chunk = chunk_of(x_.count, each, now);
        copy(inbox(rank_, now), x_.data + chunk.begin * item, chunk.count() * item);
    }
    if (now >= 1) {
        const Range chunk = chunk_of(x_.count, each, now - 1);
        char* here = x_.data + chunk.begin * item;
        char* const sources[2] = {rank_ == 0 ? here : inbox(0, now - 1), rank_ == 1 ? here : inbox(1, now - 1)};
        loops().sum(x_.dtype, sources, 2, &here, 1, chunk.count());
    }
    if (step + 1 == steps_ && step > 0) chunks_ += chunks;
    return true;
}

// Anywhere, any number of ranks, three chunks under way at once; slice s of a chunk is added by rank s:
//
//     step k    copy chunk k to my inbox | add my slice of chunk k-1 to the outbox | copy chunk k-2 from the outbox
bool ShmGroup::reduce_staged(int step) {
    const int now = step - staged_from_;
    const std::size_t item = item_size(x_.dtype), each = kChunk / item;
    const int chunks = chunks_in(x_.count, each);
    if (now < chunks) {
        const Range chunk = chunk_of(x_.count, each, now);
        for (int s = 0; s < size_; s++) {
            const Range slice = part_of(chunk.count(), size_, s, item);
            if (s == rank_) continue;  // it is read where it is
            copy(inbox(rank_, now) + slice.begin * item, x_.data + (chunk.begin + slice.begin) * item,
                 slice.count() * item);
        }
    }
    if (now >= 1 && now <= chunks) {
        const Range chunk = chunk_of(x_.count, each, now - 1);
        const Range slice = part_of(chunk.count(), size_, rank_, item);
        char* here = x_.data + (chunk.begin + slice.begin) * item;
        char* sources[kMaxRanks];
        for (int r = 0; r < size_; r++) sources[r] = r == rank_ ? here : inbox(r, now - 1) + slice.begin * item;
        char* sums[2] = {here, outbox(now - 1) + slice.begin * item};
        loops().sum(x_.dtype, sources, size_, sums, 2, slice.count());
    }
    if (now >= 2) {
        const Range chunk = chunk_of(x_.count, each, now - 2);
        for (int s = 0; s < size_; s++) {
            const Range slice = part_of(chunk.count(), size_, s, item);
            if (s == rank_) continue;
            copy(x_.data + (chunk.begin + slice.begin) * item, outbox(now - 2) + slice.begin * item,
                 slice.count() * item);
        }
    }
    if (step + 1 == steps_ && step > 0) chunks_ += chunks;
    return true;
}

}  // namespace hpdl
