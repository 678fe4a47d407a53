#include "mpi_api.h"

#include <dlfcn.h>

#include <cstring>

namespace hpdl {

namespace {

template <typename Function>
void find(void* library, Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("the loaded MPI library has no ") + name);
}

}  // namespace

Mpi::Mpi(const std::string& loaded_by, int rank, const Constants& told) : constants(told), rank_(rank) {
    if (constants.status_nbytes > sizeof(Status)) throw std::runtime_error("MPI_Status is larger than expected");
    if (constants.tag_offset > sizeof(Status) - sizeof(int))
        throw std::runtime_error("the tag lies beyond the end of MPI_Status");
    // dlsym on this handle also searches the libraries that it is linked with: exactly the MPI that mpi4py calls. The
    // handle is never closed, as mpi4py never unloads it.
    void* library = dlopen(loaded_by.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (!library) throw std::runtime_error(loaded_by + " is not loaded");
    find(library, Isend, "MPI_Isend");
    find(library, Irecv, "MPI_Irecv");
    find(library, Iprobe, "MPI_Iprobe");
    find(library, Test, "MPI_Test");
    find(library, Cancel, "MPI_Cancel");
    find(library, Iallgather, "MPI_Iallgather");
    find(library, Comm_idup, "MPI_Comm_idup");
    find(library, Allreduce, "MPI_Allreduce");
    find(library, Reduce_scatter_block, "MPI_Reduce_scatter_block");
    find(library, Reduce, "MPI_Reduce");
    find(library, Bcast, "MPI_Bcast");
    find(library, Allgather, "MPI_Allgather");
    find(library, Alltoall, "MPI_Alltoall");
    find(library, Gather, "MPI_Gather");
    find(library, Scatter, "MPI_Scatter");
    find(library, Error_string, "MPI_Error_string");
    find(library, Error_class, "MPI_Error_class");
    find(library, Finalized, "MPI_Finalized");
}

void Mpi::check(int code, const char* call) const {
    if (code == 0) return;  // MPI_SUCCESS is 0 in every MPI
    char text[4096] = "";
    int length = 0;
    Error_string(code, text, &length);
    throw MpiError(std::string(call) + " failed on rank " + std::to_string(rank_) + ": " + text);
}

bool Mpi::is_truncation(int code) const {
    int kind = 0;
    return code != 0 && Error_class(code, &kind) == 0 && kind == constants.error_truncate;
}

bool Mpi::is_over() const {
    int over = 0;
    return Finalized(&over) != 0 || over;
}

void Mpi::require_tag(int tag) const {
    if ((tag < 0 && tag != constants.any_tag) || tag > kLargestTag)
        throw std::logic_error("the tag " + std::to_string(tag) + " is not from 0 to " + std::to_string(kLargestTag));
}

int Mpi::tag(const Status& status) const {
    int tag;
    std::memcpy(&tag, status.bytes + constants.tag_offset, sizeof tag);
    return tag;
}

}  // namespace hpdl
