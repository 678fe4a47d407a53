// The MPI library that mpi4py has loaded, whichever it is. This is the only file that knows how it was found:
// the algorithms beside it read as ordinary MPI code, and one build serves MPICH, Open MPI and their kin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "dtype.h"

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

// What the header mpi.h would have said, told by mpi4py.
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
    // Args:   loaded_by: path of a shared library that is linked with MPI and already loaded: mpi4py's extension
    // module.
    //         rank: of this process in MPI_COMM_WORLD, for the texts of errors.
    // Throws: std::runtime_error where the library is not loaded or a function is missing.
    Mpi(const std::string& loaded_by, int rank, const Constants& constants);

    // Throw MpiError unless `code`, which `call` returned, is MPI_SUCCESS.
    void check(int code, const char* call) const;
    bool is_truncation(int code) const;
    int tag(const Status& status) const;
    // Before every message. Throws: std::logic_error for a tag that not every MPI has.
    void require_tag(int tag) const;
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
};

}  // namespace hpdl
