// Some ranks of a communicator wait until all of them are here, by empty messages, so that who gives up spoils nothing.
//
//     others:  "here" ------> first rank: waits for all ------> "go"
//              "gone" ------> who has given up is no longer here
//
// Once the first rank has said "go", everybody goes on: who gives up has to see first whether that has happened.
#pragma once

#include <vector>

#include "message.h"
#include "operation.h"

namespace hpdl {

class Arrival : public Operation {
  public:
    // ranks: of `group`, the caller's among them, in the same order everywhere. number: no other arrival has it.
    // Throws std::invalid_argument.
    Arrival(const Group& group, const std::vector<int>& ranks, int number);
    ~Arrival() override;
    Arrival(const Arrival&) = delete;

    bool advance() override;

    // Stop waiting. True where that is too late: the others go on, and so must this rank. Takes at most `seconds`.
    bool give_up(double seconds);

  private:
    void send(int to, int tag);
    void receive(int source, int tag, Handle* request);
    bool is_done(Handle* request, const char* call);
    bool is_here(std::size_t i);

    Group group_;
    std::vector<int> others_;
    bool first_, told_ = false;     // told: this rank has said, or heard, "go"
    int here_, gone_;               // tags
    std::vector<Handle> heard_;     // "here" from each other rank, or "go" from the first
    std::vector<bool> taken_back_;  // by each other rank: its "gone" is being received
    std::vector<Handle> sent_;
};

}  // namespace hpdl
