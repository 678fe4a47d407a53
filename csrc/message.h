// One message between two ranks, which carries its dtype and count so that the two ranks can compare them.
//
// A small message travels alone. A large one is announced: its count and a tag of its own go ahead, its elements follow
// with that tag in the inner communicator, where only a rank that expects exactly these receives them. So no large
// message ever meets a receive that is too small for it: Open MPI 5 would write beyond the end of that memory.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "buffer.h"
#include "mpi.h"
#include "progress.h"

namespace hpdl {

// Tags in the inner communicator that announcements never give away.
constexpr int kReservedTag = kLargestTag;

class Message : public Operation {
  public:
    // Post the send or the receive. The memory must stay until `advance` returns true or `cancel` does.
    static Message send(Group& group, const Buffer& buffer, int dst);
    static Message receive(const Group& group, const Buffer& buffer, int src);

    // Throws: std::invalid_argument naming both counts and dtypes if the sender meant something else; MpiError.
    // Having failed once, it throws the same at every call.
    bool advance() override;

    std::size_t nbytes() const { return buffer_.nbytes(); }

    // What had been sent, without its memory, if it was not what was expected.
    const std::optional<Buffer>& sent() const { return sent_; }

    // Give up: cancel what has not begun. True when MPI will not touch the memory again.
    bool cancel();

  private:
    struct Announcement {
        std::size_t count;
        int tag;
    };

    Message(const Group& group, const Buffer& buffer, int peer, bool receives);
    void post(void* data, std::size_t nbytes, Handle comm, int tag);
    void post_elements();
    bool test_parts();
    void require_match(int code, const Status& status);

    Group group_;
    Buffer buffer_;
    int peer_;
    bool receives_;
    bool large_;                            // announced
    std::unique_ptr<char[]> announcement_;  // of a large message; or what is received if it would not fit
    std::vector<Handle> parts_;
    std::optional<Buffer> sent_;
    std::exception_ptr failure_;
    std::size_t done_ = 0, cancelled_ = 0;  // parts
};

}  // namespace hpdl
