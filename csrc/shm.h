// Memory that ranks of one machine share, and their collectives in it.
#pragma once

#include <atomic>
#include <coroutine>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "path.h"
#include "progress.h"

namespace hpdl {

// Memory that the ranks of one machine share. It has no name in /dev/shm, so nothing is left
// behind whatever kills a rank, and the small /dev/shm of a container is no limit.
class SharedMemory {
  public:
    // New zeroed memory of `nbytes` > 0. Throws std::runtime_error with the system's reason.
    static std::shared_ptr<SharedMemory> create(std::size_t nbytes);
    // The memory that another rank has created. `name` is what its name() says. Throws std::runtime_error if that is
    // not there, or smaller.
    static std::shared_ptr<SharedMemory> open(const std::string& name, std::size_t nbytes);

    SharedMemory(const SharedMemory&) = delete;
    ~SharedMemory();

    // Take the pages of [offset, offset + nbytes) now, on this rank's memory node. Throws std::runtime_error if there
    // are none, instead of a SIGBUS later; std::invalid_argument beyond the end.
    void reserve(std::size_t offset, std::size_t nbytes);
    // Every rank has opened it: nobody can open it any more, and it ends with the last rank.
    void seal();

    char* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }
    const std::string& name() const { return name_; }

    // Throw std::invalid_argument unless all of [offset, offset + nbytes) is in the memory.
    void require_inside(std::size_t offset, std::size_t nbytes) const;

  private:
    SharedMemory(int file, std::size_t nbytes, std::string name);
    void map();

    char* data_ = nullptr;
    std::size_t nbytes_;
    std::string name_;
    int file_;
};

constexpr int kMaxRanks = 1024;  // on one machine

// Collectives of ranks that share memory. One at a time, in lockstep: a collective is a coroutine that awaits a barrier
// of all ranks between any two of its steps.
//
//     rank 0   | step 0 | barrier | step 1 | barrier | step 2
//     rank 1   | step 0 | barrier | step 1 | barrier | step 2
//
// Barrier: write in a cell of one's own how many barriers one has reached, then look at the cells of the others.
// At the first barrier every rank also proposes what to do (its Call), so that all of them see a disagreement.
// A buffer that is written in one step may be written again two barriers later: a rank that has reached the barrier
// between has finished reading it. Hence everything below exists twice.
class ShmGroup : public Operation {
  public:
    // Bytes of shared memory that `size` ranks need for barriers and for tensors that are not shared.
    static std::size_t nbytes_for(int size);

    // Of it, at the beginning, what barriers and small tensors need.
    static std::size_t seats_nbytes_for(int size) { return size * sizeof(Seat); }

    // memory: zeroed, nbytes_for(size) bytes, the same on every rank. Throws std::invalid_argument.
    // takes_turns: ranks share cores, with each other or with what they compute. Rank 0's counts: what such ranks
    // measure is when they get a core, so they do not, and take the path with the fewest barriers.
    ShmGroup(std::shared_ptr<SharedMemory> memory, int rank, int size, bool takes_turns);

    // Add memory in which rank r has the bytes [r * part, (r + 1) * part). In the same order on every rank.
    // Throws std::invalid_argument.
    void add(std::shared_ptr<SharedMemory> memory, std::size_t part);

    // Each begins a collective, which `advance` finishes. The tensors must stay until then. Each throws, before the
    // first barrier, std::invalid_argument for tensors that do not fit, overlap, or are to be added and not aligned.
    // What exists on the root alone is {} elsewhere. `out` may be x's row of this rank, or x its row of out, or both
    // the same.
    void start_barrier(const Call& call);
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

    std::size_t nbytes() const { return nbytes_; }  // of the tensor of the last collective
    std::vector<Call> calls() const override { return calls_; }
    std::vector<int> missing() const override;

  private:
    struct Segment {
        std::shared_ptr<SharedMemory> memory;
        std::size_t part;
    };
    struct Proposal {
        Call call;
        std::int64_t offset;   // of x from the start of its rank's part
        std::int32_t segment;  // which holds x, or -1 if x is not in shared memory
        std::uint8_t path;     // rank 0's: by which the next tensors are staged, kMeasure or kProbe
        bool tries;            // within `measure`: there is more to try
    };
    struct alignas(64) Cell {
        std::atomic<std::uint64_t> barrier;  // the last one that its rank has reached
        Proposal proposal;
        alignas(64) char note[4096 - 64];  // a small tensor comes along with its proposal
    };
    struct Seat {
        Cell cells[2];
    };

    // A collective under way, which has run up to its first barrier.
    class Steps {
      public:
        struct promise_type {
            Steps get_return_object() { return Steps(std::coroutine_handle<promise_type>::from_promise(*this)); }
            std::suspend_never initial_suspend() noexcept { return {}; }
            std::suspend_always final_suspend() noexcept { return {}; }
            void return_void() {}
            void unhandled_exception() { throw; }
        };

        Steps() = default;
        Steps(Steps&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
        Steps& operator=(Steps&& other) noexcept {
            std::swap(handle_, other.handle_);
            return *this;
        }
        ~Steps() {
            if (handle_) handle_.destroy();
        }
        bool are_done() const { return !handle_ || handle_.done(); }
        void go_on() { handle_.resume(); }

      private:
        explicit Steps(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
        std::coroutine_handle<promise_type> handle_;
    };

    // co_await it: reach the next barrier, and go on when all ranks have.
    struct Barrier : std::suspend_always {
        ShmGroup& group;
        explicit Barrier(ShmGroup& at) : group(at) {}
        void await_suspend(std::coroutine_handle<>) const noexcept { group.reach_barrier(); }
    };

    void start(const Call& call, const Buffer& x);
    void take_pages();
    void reach_barrier();
    bool is_complete();
    void compare_calls();
    Proposal propose(const Call& call, const Buffer& x) const;
    Cell& cell_of(int rank) const { return seats_[rank].cells[first_barrier_ & 1]; }
    std::size_t chunk_length(DType dtype, int parts) const;
    int chunks_in(const Buffer& x, int parts = 1) const;
    Buffer chunk_of(const Buffer& x, int i, int parts = 1) const;
    void put(char* to, const Buffer& from) const;
    void place(int k, std::size_t nbytes);
    char* inbox(int rank, int k) const;                    // what `rank` has copied of its chunk k
    char* outbox(int k) const { return inbox(size_, k); }  // sums of a chunk, each slice written by one rank

    Steps rest();
    Steps add_notes(Buffer x);
    Steps all_reduce(Buffer x);
    void add_shared(const Buffer& x, const Buffer& part) const;
    void stage_for_sum(const Buffer& chunk, int k);
    void add_staged(const Buffer& chunk, int k) const;
    void collect_sums(const Buffer& chunk, int k) const;
    void end_staging();
    Steps probe(std::size_t times);
    void time_notes() const;
    Steps measure();
    Steps take(std::uint8_t path);
    void follow(std::uint8_t path);
    template <typename Source>
    void add_all(Source source, const Buffer& sum, char* also = nullptr) const;
    template <typename Stage, typename Use>
    Steps in_chunks(Buffer row, int parts, int pieces, Stage stage, Use use);
    void gather(const Call& call, const Buffer& x, const Buffer& out, bool receives);
    void stage_rows(const Buffer& x, int k) const;
    char* row_from(int src, int k, const Buffer& mine) const;

    std::shared_ptr<SharedMemory> memory_;
    Seat* seats_;
    int rank_, size_;
    bool takes_turns_;
    std::vector<Segment> segments_;

    Steps steps_;
    std::vector<Call> calls_;
    std::size_t nbytes_ = 0;
    std::uint64_t barriers_ = 0, first_barrier_ = 0;
    bool compared_ = false;     // the calls of all ranks
    int present_ = 0;           // ranks 0 .. present_ - 1 have reached the current barrier
    Choice* choice_ = nullptr;  // rank 0's, where there are others
    std::uint8_t path_ = 0;     // in kPaths
    std::uint8_t told_ = 0;     // rank 0's, for what comes after this collective
    std::size_t pages_ = 0;     // bytes of its ring that have been taken
    bool has_staged_ = false;   // something, so that it matters
    // Of a ring: the chunk that was placed last, by the collectives before this one, for broadcast in a ring of its
    // own; and by this one.
    struct Piece {
        std::size_t begin = 0, end = 0;
    };
    Piece staged_[2], latest_;
    bool broadcasts_ = false;
    std::size_t places_[4];  // of its last chunks
};

// An all-reduce of x as a task of `group`, which must live as long as the task. Throws std::invalid_argument.
Parts all_reduce_in_memory(ShmGroup& group, const Buffer& x);

}  // namespace hpdl
