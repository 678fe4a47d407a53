// How ranks come together through MPI: do all mean the same collective, are all of them here?
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "buffer.h"
#include "mpi.h"
#include "progress.h"

namespace hpdl {

// All ranks exchange their calls, and a few more bytes. The calls are compared on every rank, so that all raise or
// none. Completes when every rank has come.
class Consensus : public Operation {
  public:
    static constexpr std::size_t kNote = 120;  // bytes

    // note: at most kNote bytes for the other ranks. MPI has nothing to do with it before the first `advance`, when the
    // caller is ready to keep the memory if it does not complete.
    Consensus(const Group& group, const Call& call, const std::string& note);

    bool advance() override;

    // The notes of all ranks, in rank order; after completion.
    std::vector<std::string> notes() const;
    // What every rank meant, once all have come, also if they disagree.
    std::vector<Call> calls() const override { return calls_; }

  private:
    struct Entry {
        Call call;
        std::uint32_t note_nbytes;
        char note[kNote];
    };

    void post();

    Group group_;
    bool posted_ = false;
    Entry mine_{};
    std::vector<Entry> all_;
    std::vector<Call> calls_;
    Handle request_;
};

// Two duplicates of a communicator, in which no message of the first can be received. All ranks must come.
class Duplicates : public Operation {
  public:
    Duplicates(const Mpi& mpi, Handle comm);

    bool advance() override;
    Handle first() const { return comms_[1]; }
    Handle second() const { return comms_[2]; }

  private:
    const Mpi* mpi_;
    Handle comms_[3];  // each is a duplicate of the one before
    int made_ = 0;
    Handle request_;
};

// Some ranks of a communicator wait until all of them are here, by empty messages, so that a rank can give up and
// spoils nothing.
//
//     others:  "here" ------> first rank: waits for all ------> "go"
//              "gone" ------> a rank that has given up is no longer here
//
// Once the first rank has said "go", everybody goes on: a rank that gives up must see first whether that has happened.
class Rendezvous : public Operation {
  public:
    // ranks: of `group`, the caller's among them, in the same order everywhere. number: no other rendezvous has it.
    // Throws std::invalid_argument.
    Rendezvous(const Group& group, const std::vector<int>& ranks, int number);
    ~Rendezvous() override;
    Rendezvous(const Rendezvous&) = delete;

    bool advance() override;

    // Stop waiting. True if that is too late: the others go on, and so must this rank. Takes at most `seconds`.
    bool give_up(double seconds);

  private:
    void send(int dst, int tag);
    void receive(std::size_t i, int tag);
    void cancel_receives();
    bool is_present(std::size_t i);

    Group group_;
    std::vector<int> others_;
    bool first_, released_ = false;  // released: this rank has said, or received, "go"
    int here_, gone_;                // tags
    std::vector<Handle> receives_;   // "here" from each other rank, or "go" from the first
    std::vector<bool> withdrawn_;    // by each other rank: its "gone" is being received
    std::vector<Handle> sends_;
};

}  // namespace hpdl
