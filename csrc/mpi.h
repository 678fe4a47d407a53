// The MPI library that mpi4py has loaded, whichever it is, and messages through it. Only this file and its source know
// how it was found: the algorithms read as ordinary MPI code, and one build serves MPICH, Open MPI and their kin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "buffer.h"
#include "progress.h"

namespace hpdl {

// The largest tag that the standard promises; providers such as UCX and Slingshot have few more.
constexpr int kLargestTag = 32767;

// MPI_Comm, MPI_Request, MPI_Datatype, MPI_Op: an int for MPICH and its kin, a pointer for Open MPI. An int handle
// lives in the low half, which is the half that a callee reads and writes on a little-endian machine.
using Handle = std::uintptr_t;
static_assert(sizeof(void*) == 8, "handles travel in 64 bits");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "handles are narrowed to their low half");

// MPI_Status as opaque memory: its layout is learned from mpi4py (Constants::tag_offset).
struct Status {
    alignas(8) unsigned char bytes[64];
};

// What MPI's own header would have defined, as mpi4py knows it.
struct Constants {
    int any_tag, error_truncate;
    Handle in_place, request_null, byte, sum;
    Handle dtypes[kDTypes];  // 0 for those that MPI does not know
    std::size_t status_nbytes, tag_offset;
};

// An MPI call that failed: the call, the rank and MPI_Error_string.
struct MpiError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Mpi {
  public:
    // Args:   loaded_by: path of a shared library that is linked with MPI and already loaded: mpi4py's extension.
    //         rank: of this process in MPI_COMM_WORLD, for the texts of errors.
    // Throws: std::runtime_error if the library is not loaded or a function is missing.
    Mpi(const std::string& loaded_by, int rank, const Constants& constants);

    // Throw MpiError unless `code`, which `call` returned, is MPI_SUCCESS.
    void check(int code, const char* call) const;
    bool is_truncation(int code) const;
    int tag(const Status& status) const;

    // Begin a message of bytes; the memory must stay until the request is done. Throws: MpiError; std::logic_error for
    // a tag that not every MPI has.
    Handle send(const void* data, std::size_t nbytes, int dst, int tag, Handle comm) const;
    Handle receive(void* data, std::size_t nbytes, int src, int tag, Handle comm) const;
    // Has it ended? A null request has. call: "MPI_Irecv", for the text of an MpiError.
    bool is_done(Handle& request, const char* call) const;
    // MPI has ended: it ends the process that calls anything else.
    bool is_over() const;

    const Constants constants;

    int (*Isend)(const void*, int, Handle, int, int, Handle, Handle*);
    int (*Irecv)(void*, int, Handle, int, int, Handle, Handle*);
    int (*Iprobe)(int, int, Handle, int*, Status*);
    int (*Test)(Handle*, int*, Status*);
    int (*Cancel)(Handle*);
    int (*Iallgather)(const void*, int, Handle, void*, int, Handle, Handle, Handle*);
    int (*Comm_idup)(Handle, Handle*, Handle*);
    int (*Allreduce)(const void*, void*, int, Handle, Handle, Handle);
    int (*Reduce_scatter_block)(const void*, void*, int, Handle, Handle, Handle);
    int (*Reduce)(const void*, void*, int, Handle, Handle, int, Handle);
    int (*Bcast)(void*, int, Handle, int, Handle);
    int (*Allgather)(const void*, int, Handle, void*, int, Handle, Handle);
    int (*Alltoall)(const void*, int, Handle, void*, int, Handle, Handle);
    int (*Gather)(const void*, int, Handle, void*, int, Handle, int, Handle);
    int (*Scatter)(const void*, int, Handle, void*, int, Handle, int, Handle);

  private:
    int (*Error_string)(int, char*, int*);
    int (*Error_class)(int, int*);
    int (*Finalized)(int*);
    int rank_;

    void require_tag(int tag) const;
};

// A communicator as the algorithms see it, with a duplicate for what its users never receive themselves.
struct Group {
    const Mpi* mpi;
    Handle comm, inner;
    int rank, size;
    unsigned announced = 0;  // large messages sent
};

// Tags in the inner communicator that announcements never give away.
constexpr int kReservedTag = kLargestTag;

// One message between two ranks, which carries its dtype and count so that the two ranks can compare them.
//
// A small message travels alone. A large one is announced: its count and a tag of its own go ahead, its elements follow
// with that tag in the inner communicator, where only a rank that expects exactly these receives them. So no large
// message ever finds a receive that is too small for it: Open MPI 5 would write beyond the end of that memory.
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

// The MPI library's own collectives, to race against. They block, and neither a signal nor a deadline reaches them:
// all ranks must be on their way into the same one. hpdl_lab/comm/base.py says what each leaves behind.
// All throw std::invalid_argument for memory that does not fit, before any message, and MpiError.
namespace mpi {

void all_reduce(const Group& group, const Buffer& x, const Buffer& out);      // in place if they are the same
void reduce_scatter(const Group& group, const Buffer& x, const Buffer& out);  // x: size rows like out
void all_gather(const Group& group, const Buffer& x, const Buffer& out);      // out: size rows like x
void all_to_all(const Group& group, const Buffer& x, const Buffer& out);      // size rows each
void broadcast(const Group& group, const Buffer& x, int root);
void reduce(const Group& group, const Buffer& x, const Buffer& out, int root);   // out: of the root alone
void gather(const Group& group, const Buffer& x, const Buffer& out, int root);   // out: of the root alone
void scatter(const Group& group, const Buffer& x, const Buffer& out, int root);  // x: of the root alone

}  // namespace mpi

}  // namespace hpdl
