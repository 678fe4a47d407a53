// The steps of the collectives. Step 0 comes before the first meeting: it may write to this rank's cell and inbox only.
#include <cstring>

#include "reduce.h"
#include "shm_group.h"
#include "shm_staging.h"

namespace hpdl {

namespace {

constexpr std::size_t kReduceAtOnce = std::size_t{4} << 20;  // bytes, some 1 ms: between two looks at signals

}  // namespace

// -- all_reduce: small, in shared memory, or anywhere
// -------------------------------------------------------------------

void ShmGroup::start_all_reduce(const Buffer& x) {
    start("all_reduce", x, {}, -1, x.nbytes() <= sizeof(Cell::note) ? &ShmGroup::reduce_notes : &ShmGroup::all_reduce,
          2);
}

// Small: everybody adds everything. One meeting.
bool ShmGroup::reduce_notes(int step) {
    if (step == 0) {
        std::memcpy(seats_[rank_].cells[first_meeting_ & 1].note, x_.data, x_.nbytes());
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
        std::memcpy(inbox(rank_, now), x_.data + chunk.begin * item, chunk.count() * item);
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
            std::memcpy(inbox(rank_, now) + slice.begin * item, x_.data + (chunk.begin + slice.begin) * item,
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
            std::memcpy(x_.data + (chunk.begin + slice.begin) * item, outbox(now - 2) + slice.begin * item,
                        slice.count() * item);
        }
    }
    if (step + 1 == steps_ && step > 0) chunks_ += chunks;
    return true;
}

// -- the others: copy chunk k to the inbox, use chunk k-1 of the others' inboxes
// ------------------------------------------

void ShmGroup::start_broadcast(const Buffer& x, int root) {
    const int chunks = chunks_in(x.count, kChunk / item_size(x.dtype));
    start("broadcast", x, {}, root, &ShmGroup::broadcast, chunks + 1);
}

bool ShmGroup::broadcast(int step) {
    const std::size_t item = item_size(x_.dtype), each = kChunk / item;
    if (rank_ == root_ && step + 1 < steps_) {
        const Range chunk = chunk_of(x_.count, each, step);
        std::memcpy(inbox(root_, step), x_.data + chunk.begin * item, chunk.count() * item);
    }
    if (rank_ != root_ && step > 0) {
        const Range chunk = chunk_of(x_.count, each, step - 1);
        std::memcpy(x_.data + chunk.begin * item, inbox(root_, step - 1), chunk.count() * item);
    }
    if (step + 1 == steps_) chunks_ += step;
    return true;
}

void ShmGroup::start_all_gather(const Buffer& x, const Buffer& out) {
    const int chunks = chunks_in(x.count, kChunk / item_size(x.dtype));
    start("all_gather", x, out, -1, &ShmGroup::all_gather, chunks + 1);
}

bool ShmGroup::all_gather(int step) {
    const std::size_t item = item_size(x_.dtype), each = kChunk / item;
    if (step + 1 < steps_) {
        const Range chunk = chunk_of(x_.count, each, step);
        std::memcpy(inbox(rank_, step), x_.data + chunk.begin * item, chunk.count() * item);
    }
    if (step > 0) {
        const Range chunk = chunk_of(x_.count, each, step - 1);
        for (int r = 0; r < size_; r++) {
            std::memcpy(out_.data + (r * x_.count + chunk.begin) * item, inbox(r, step - 1), chunk.count() * item);
        }
    }
    if (step + 1 == steps_) chunks_ += step;
    return true;
}

void ShmGroup::start_reduce_scatter(const Buffer& x, const Buffer& out) {
    const int chunks = chunks_in(out.count, kChunk / item_size(x.dtype) / size_);
    start("reduce_scatter", x, out, -1, &ShmGroup::reduce_scatter, chunks + 1);
}

bool ShmGroup::reduce_scatter(int step) {
    const std::size_t item = item_size(x_.dtype), each = kChunk / item / size_;
    if (step + 1 < steps_) {
        const Range chunk = chunk_of(out_.count, each, step);
        for (int row = 0; row < size_; row++) {
            std::memcpy(inbox(rank_, step) + row * each * item, x_.data + (row * out_.count + chunk.begin) * item,
                        chunk.count() * item);
        }
    }
    if (step > 0) {
        const Range chunk = chunk_of(out_.count, each, step - 1);
        char* rows[kMaxRanks];
        for (int r = 0; r < size_; r++) rows[r] = inbox(r, step - 1) + rank_ * each * item;
        char* sums = out_.data + chunk.begin * item;
        loops().sum(x_.dtype, rows, size_, &sums, 1, chunk.count());
    }
    if (step + 1 == steps_) chunks_ += step;
    return true;
}

}  // namespace hpdl
