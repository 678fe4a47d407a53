// One message between two ranks, which carries its dtype and count so that the ends can disagree politely.
#pragma once

#include <vector>

#include "dtype.h"
#include "mpi_api.h"
#include "operation.h"

namespace hpdl {

// A communicator as the algorithms see it.
struct Group {
    const Mpi* mpi;
    Handle comm;
    int rank, size;
};

// The tag of a message: dtype in the low 3 bits, count modulo 2^25 above them. 2^28 is below every MPI's largest tag.
int tag_of(std::size_t count, DType dtype);

class Message : public Operation {
  public:
    // Post the send or the receive. The memory must stay until `advance` returns true or `cancel` does.
    static Message send(const Group& group, const Buffer& buffer, int to);
    static Message receive(const Group& group, const Buffer& buffer, int source);

    // Throws: std::invalid_argument naming both counts and dtypes where the sender meant something else; MpiError.
    bool advance() override;

    std::size_t nbytes() const { return buffer_.nbytes(); }

    // Give up: cancel what has not begun. True when MPI will not touch the memory again.
    bool cancel();

  private:
    Message(const Group& group, const Buffer& buffer, int peer) : group_(group), buffer_(buffer), peer_(peer) {}
    void require_match(int code, const Status& status, std::size_t nbytes) const;

    Group group_;
    Buffer buffer_;
    int peer_;
    bool receives_ = false;
    std::vector<Handle> pieces_;  // of 1 GiB at most, because MPI counts bytes with an int
    std::size_t done_ = 0;        // pieces
    std::size_t cancelled_ = 0;   // pieces
};

}  // namespace hpdl
