// The collectives beside all_reduce. In all of them chunk k is copied to an inbox in step k, and used in step k+1.
#include <stdexcept>

#include "reduce.h"
#include "shm_group.h"
#include "shm_staging.h"

namespace hpdl {

void ShmGroup::require_root(int root) const {
    if (root < 0 || root >= size_)
        throw std::invalid_argument("no root " + std::to_string(root) + " among " + std::to_string(size_));
}

// -- broadcast ---------------------------------------------------------------------------------------------------

void ShmGroup::start_broadcast(const Buffer& x, int root) {
    require_root(root);
    const int chunks = chunks_in(x.count, kChunk / item_size(x.dtype));
    start(Call::of("broadcast", x.count, x.dtype, root), x, {}, &ShmGroup::broadcast, chunks + 1);
}

bool ShmGroup::broadcast(int step) {
    const std::size_t item = item_size(x_.dtype), each = kChunk / item;
    if (rank_ == root_ && step + 1 < steps_) {
        const Range chunk = chunk_of(x_.count, each, step);
        copy(inbox(root_, step), x_.data + chunk.begin * item, chunk.count() * item);
    }
    if (rank_ != root_ && step > 0) {
        const Range chunk = chunk_of(x_.count, each, step - 1);
        copy(x_.data + chunk.begin * item, inbox(root_, step - 1), chunk.count() * item);
    }
    if (step + 1 == steps_) chunks_ += step;
    return true;
}

// -- all_gather, gather, reduce: everybody's whole x -----------------------------------------------------------

void ShmGroup::start_all_gather(const Buffer& x, const Buffer& out) {
    require_rows(out, x, size_, "all_gather");
    const Buffer row{out.data + rank_ * x.nbytes(), x.count, x.dtype};
    if (x.data != row.data) require_apart(x, out, "all_gather");
    start(Call::of("all_gather", x.count, x.dtype), x, out, &ShmGroup::gather,
          chunks_in(x.count, kChunk / item_size(x.dtype)) + 1);
}

void ShmGroup::start_gather(const Buffer& x, const Buffer& out, int root) {
    require_root(root);
    if (rank_ == root) {
        require_rows(out, x, size_, "gather");
        if (x.data != out.data + rank_ * x.nbytes()) require_apart(x, out, "gather");
    }
    start(Call::of("gather", x.count, x.dtype, root), x, out, &ShmGroup::gather,
          chunks_in(x.count, kChunk / item_size(x.dtype)) + 1);
}

bool ShmGroup::gather(int step) {
    const std::size_t item = item_size(x_.dtype), each = kChunk / item;
    if (step + 1 < steps_) {
        const Range chunk = chunk_of(x_.count, each, step);
        copy(inbox(rank_, step), x_.data + chunk.begin * item, chunk.count() * item);
    }
    if (step > 0 && is_receiver()) {
        const Range chunk = chunk_of(x_.count, each, step - 1);
        for (int r = 0; r < size_; r++) {
            copy(out_.data + (r * x_.count + chunk.begin) * item, inbox(r, step - 1), chunk.count() * item);
        }
    }
    if (step + 1 == steps_) chunks_ += step;
    return true;
}

void ShmGroup::start_reduce(const Buffer& x, const Buffer& out, int root) {
    require_root(root);
    require_aligned(x, "reduce");
    if (rank_ == root) {
        require_rows(out, x, 1, "reduce");
        require_aligned(out, "reduce");
        require_apart(x, out, "reduce");
    }
    start(Call::of("reduce", x.count, x.dtype, root), x, out, &ShmGroup::reduce,
          chunks_in(x.count, kChunk / item_size(x.dtype)) + 1);
}

bool ShmGroup::reduce(int step) {
    const std::size_t item = item_size(x_.dtype), each = kChunk / item;
    if (rank_ != root_ && step + 1 < steps_) {
        const Range chunk = chunk_of(x_.count, each, step);
        copy(inbox(rank_, step), x_.data + chunk.begin * item, chunk.count() * item);
    }
    if (rank_ == root_ && step > 0) {
        const Range chunk = chunk_of(x_.count, each, step - 1);
        char* sources[kMaxRanks];
        for (int r = 0; r < size_; r++) sources[r] = r == rank_ ? x_.data + chunk.begin * item : inbox(r, step - 1);
        char* sums = out_.data + chunk.begin * item;
        loops().sum(x_.dtype, sources, size_, &sums, 1, chunk.count());
    }
    if (step + 1 == steps_) chunks_ += step;
    return true;
}

// -- reduce_scatter, all_to_all, scatter: x has a row for each rank ----------------------------------------------

// row: elements.
void ShmGroup::start_rows(const Call& call, const Buffer& x, const Buffer& out, std::size_t row, Step step) {
    row_ = row;
    start(call, x, out, step, chunks_in(row, kChunk / item_size(out.dtype) / size_) + 1);
}

void ShmGroup::start_reduce_scatter(const Buffer& x, const Buffer& out) {
    require_rows(x, out, size_, "reduce_scatter");
    require_aligned(x, "reduce_scatter");
    require_aligned(out, "reduce_scatter");
    if (out.data != x.data + rank_ * out.nbytes()) require_apart(x, out, "reduce_scatter");
    start_rows(Call::of("reduce_scatter", x.count, x.dtype), x, out, out.count, &ShmGroup::reduce_scatter);
}

void ShmGroup::copy_rows(int step) {
    const std::size_t item = item_size(x_.dtype), each = kChunk / item / size_;
    const Range chunk = chunk_of(row_, each, step);
    for (int row = 0; row < size_; row++) {
        copy(inbox(rank_, step) + row * each * item, x_.data + (row * row_ + chunk.begin) * item, chunk.count() * item);
    }
}

// What rank `from` has for this rank.
char* ShmGroup::row_from(int from, int step) const {
    const std::size_t item = item_size(out_.dtype), each = kChunk / item / size_;
    return inbox(from, step) + rank_ * each * item;
}

bool ShmGroup::reduce_scatter(int step) {
    const std::size_t item = item_size(x_.dtype), each = kChunk / item / size_;
    if (step + 1 < steps_) copy_rows(step);
    if (step > 0) {
        const Range chunk = chunk_of(row_, each, step - 1);
        char* rows[kMaxRanks];
        for (int r = 0; r < size_; r++) rows[r] = row_from(r, step - 1);
        char* sums = out_.data + chunk.begin * item;
        loops().sum(x_.dtype, rows, size_, &sums, 1, chunk.count());
    }
    if (step + 1 == steps_) chunks_ += step;
    return true;
}

void ShmGroup::start_all_to_all(const Buffer& x, const Buffer& out) {
    require_rows(x, out, 1, "all_to_all");
    const Buffer row{out.data, out.count / size_, out.dtype};
    require_rows(out, row, size_, "all_to_all");
    require_apart(x, out, "all_to_all");
    start_rows(Call::of("all_to_all", x.count, x.dtype), x, out, row.count, &ShmGroup::all_to_all);
}

bool ShmGroup::all_to_all(int step) {
    const std::size_t item = item_size(x_.dtype), each = kChunk / item / size_;
    if (step + 1 < steps_) copy_rows(step);
    if (step > 0) {
        const Range chunk = chunk_of(row_, each, step - 1);
        for (int r = 0; r < size_; r++) {
            copy(out_.data + (r * row_ + chunk.begin) * item, row_from(r, step - 1), chunk.count() * item);
        }
    }
    if (step + 1 == steps_) chunks_ += step;
    return true;
}

void ShmGroup::start_scatter(const Buffer& x, const Buffer& out, int root) {
    require_root(root);
    if (rank_ == root) {
        require_rows(x, out, size_, "scatter");
        if (out.data != x.data + rank_ * out.nbytes()) require_apart(x, out, "scatter");
    }
    // What all ranks agree on is the row: the root alone has an x.
    start_rows(Call::of("scatter", out.count, out.dtype, root), rank_ == root ? x : out, out, out.count,
               &ShmGroup::scatter);
}

bool ShmGroup::scatter(int step) {
    const std::size_t item = item_size(out_.dtype), each = kChunk / item / size_;
    if (rank_ == root_ && step + 1 < steps_) copy_rows(step);
    if (step > 0) {
        const Range chunk = chunk_of(row_, each, step - 1);
        copy(out_.data + chunk.begin * item, row_from(root_, step - 1), chunk.count() * item);
    }
    if (step + 1 == steps_) chunks_ += step;
    return true;
}

}  // namespace hpdl
