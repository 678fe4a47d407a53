// The ring all-reduce of hpdl_lab/collectives/ring.py, compiled and cut finer: while one segment of a chunk is added,
// the next one is on its way.
//
// Rank r sends to r+1 and receives from r-1, p-1 steps of reduce-scatter and p-1 of all-gather. A chunk is cut into
// segments, and (step, segment) in this order numbers the messages of a rank: message q, once it has been received (and
// added), makes message q + segments ready to be sent, which is the same piece of x one step later.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "mpi.h"
#include "progress.h"

namespace hpdl {

class Ring : public Operation {
  public:
    // Begin to replace x by its sum over the ranks. All ranks must mean the same x. Memory as for Message.
    // segment: bytes of a message at most, of which MPI can count 2^30. traced: keep `transfers`.
    // Throws std::invalid_argument for memory that cannot be added.
    Ring(const Group& group, const Buffer& x, std::size_t segment, bool traced);

    bool advance() override;
    std::size_t nbytes() const { return x_.nbytes(); }

    // What went to rank dst(), or came from rank src(), in one step. Times of now_ns().
    struct Transfer {
        bool sends;
        std::size_t nbytes;
        std::int64_t t0_ns, t1_ns;
    };
    // One sent and one received chunk for each step, in the order of their beginnings; empty unless traced.
    std::vector<Transfer> transfers() const;
    int dst() const { return (group_.rank + 1) % group_.size; }
    int src() const { return (group_.rank + group_.size - 1) % group_.size; }

  private:
    static constexpr int kAhead = 4;  // receives and sends under way at once

    Buffer piece(int chunk, long segment) const;
    Buffer received_piece(long message) const;
    Buffer sent_piece(long message) const;
    bool may_receive() const;
    void post_receive();
    void post_send();
    void take(long message);
    void begun(std::vector<Transfer>& steps, long message, std::size_t nbytes);
    void ended(std::vector<Transfer>& steps, long message);
    void finish();

    Group group_;
    Buffer x_;
    Buffer work_;  // x, or x as float32: 16-bit floats are added in float32 and rounded once
    std::vector<float> wide_;
    std::vector<char> arriving_;  // kAhead segments, of the reduce-scatter
    std::size_t segment_;         // elements
    long segments_;               // in the longest chunk
    long messages_;               // that this rank sends, and receives
    long posted_ = 0, received_ = 0, sending_ = 0, sent_ = 0;
    Handle receives_[kAhead], sends_[kAhead];
    std::vector<Transfer> sent_steps_, received_steps_;  // by step; empty unless traced
    bool done_ = false;
};

// An all-reduce of x as a task: all ranks compare `call`, then the ring. Throws std::invalid_argument.
Parts all_reduce_by_messages(const Group& group, const Call& call, const Buffer& x, std::size_t segment, bool traced);

}  // namespace hpdl
