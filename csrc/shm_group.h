// Collectives of ranks that share memory. One at a time, in lockstep: a collective is a number of steps with a meeting
// of all ranks between any two of them.
//
//     rank 0   | step 0 | meet | step 1 | meet | step 2        meet: say in a cell of one's own how many meetings one
//     rank 1   | step 0 | meet | step 1 | meet | step 2              has come to, then look at the cells of the others
//
// Coming to the first meeting, every rank also proposes what to do (its Call), so that all of them see a disagreement.
// A buffer that is written in one step may be written again two meetings later: whoever came to the meeting between has
// finished reading it. Hence everything below exists twice.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "agreement.h"
#include "dtype.h"
#include "operation.h"
#include "shm_memory.h"

namespace hpdl {

constexpr int kMaxRanks = 1024;  // on one machine

class ShmGroup : public Operation {
  public:
    // Bytes of shared memory that `size` ranks need to meet and to exchange tensors that are not shared.
    static std::size_t nbytes_for(int size);

    // memory: zeroed, nbytes_for(size) bytes, the same on every rank. Throws std::invalid_argument.
    ShmGroup(std::shared_ptr<SharedMemory> memory, int rank, int size);

    // Tell of memory in which rank r has the bytes [r * part, (r + 1) * part). In the same order on every rank.
    // Throws std::invalid_argument.
    void add(std::shared_ptr<SharedMemory> memory, std::size_t part);

    // Each begins a collective, which `advance` finishes. The tensors must stay until then. Each throws, before the
    // first meeting, std::invalid_argument for tensors that do not fit, overlap or are not aligned where they are
    // added. What exists on the root alone is {} elsewhere. `out` may be x's row of this rank, or x its row of out, or
    // both the same.
    void start_meeting(const Call& call);
    // x becomes the sum over ranks, added in the order of ranks.
    void start_all_reduce(const Buffer& x);
    void start_broadcast(const Buffer& x, int root);
    // out: size * x.count elements, rank by rank.
    void start_all_gather(const Buffer& x, const Buffer& out);
    // x: size * out.count elements; out becomes the sum over ranks of row `rank` of x.
    void start_reduce_scatter(const Buffer& x, const Buffer& out);
    // x, out: size rows; row s of out becomes row `rank` of rank s's x.
    void start_all_to_all(const Buffer& x, const Buffer& out);
    // out, on the root: as of all_reduce, all_gather.
    void start_reduce(const Buffer& x, const Buffer& out, int root);
    void start_gather(const Buffer& x, const Buffer& out, int root);
    // x, on the root: size * out.count elements; out becomes row `rank` of it.
    void start_scatter(const Buffer& x, const Buffer& out, int root);

    bool advance() override;

    std::size_t nbytes() const { return x_.nbytes(); }

    // What every rank meant, where they disagreed in the last collective; else nothing.
    const std::vector<Call>& calls() const { return calls_; }

    // The ranks that have not come to the meeting at which this one waits.
    std::vector<int> missing() const;

  private:
    struct Segment {
        std::shared_ptr<SharedMemory> memory;
        std::size_t part;
    };
    struct Proposal {
        Call call;
        std::int64_t offset;   // of x from the start of its rank's part
        std::int32_t segment;  // which holds x, or -1 where x is not in shared memory
    };
    struct alignas(64) Cell {
        std::atomic<std::uint64_t> meeting;  // the last one that its rank has come to
        Proposal proposal;
        alignas(64) char note[4096 - 64];  // a small tensor comes along with its proposal
    };
    struct Seat {
        Cell cells[2];
    };
    // One step of a collective; false where it must be called again before the next meeting.
    using Step = bool (ShmGroup::*)(int step);

    void start(const Call& call, const Buffer& x, const Buffer& out, Step step, int steps);
    void come_to_meeting();
    bool everyone_came();
    void require_same_calls();
    Proposal propose(const Call& call, const Buffer& x) const;
    const Proposal& proposal_of(int rank) const { return seats_[rank].cells[first_meeting_ & 1].proposal; }
    char* shared_tensor_of(int rank) const;

    bool rest(int step);
    bool all_reduce(int step);
    bool reduce_notes(int step);
    bool reduce_shared(int step);
    bool reduce_in_pair(int step);
    bool reduce_staged(int step);
    bool broadcast(int step);
    bool gather(int step);
    bool reduce(int step);
    bool reduce_scatter(int step);
    bool all_to_all(int step);
    bool scatter(int step);

    void require_root(int root) const;
    void start_rows(const Call& call, const Buffer& x, const Buffer& out, std::size_t row, Step step);
    void copy_rows(int step);  // chunk `step` of each row of x to this rank's inbox
    bool is_receiver() const { return root_ < 0 || rank_ == root_; }
    char* row_from(int from, int step) const;
    char* inbox(int rank, int chunk) const;  // what `rank` has copied of its chunk
    char* outbox(int chunk) const;           // sums of a chunk, each slice written by one rank

    std::shared_ptr<SharedMemory> memory_;
    Seat* seats_;
    int rank_, size_;
    std::vector<Segment> segments_;

    std::vector<Call> calls_;
    Step step_function_ = nullptr;
    Buffer x_{}, out_{};
    std::size_t row_ = 0;  // elements of x for each rank, where x has rows
    int root_ = -1, step_ = 0, steps_ = 0;
    std::uint64_t meetings_ = 0, first_meeting_ = 0;
    int present_ = 0;           // ranks 0 .. present_ - 1 have come to the current meeting
    std::uint64_t chunks_ = 0;  // staged in all collectives before this one
    std::size_t reduced_ = 0;   // elements of this rank's slice of shared tensors
    int staged_from_ = 0;       // the step that stages the first chunk
};

}  // namespace hpdl
