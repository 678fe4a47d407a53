#include "mpi_collectives.h"

#include <climits>
#include <stdexcept>

namespace hpdl::mpi {

namespace {

// Elements as MPI counts them.
struct Elements {
    Handle dtype;
    int count;
};

Elements of(Handle dtype, std::size_t count) {
    if (count > INT_MAX) throw std::invalid_argument(std::to_string(count) + " elements: MPI counts with an int");
    return {dtype, static_cast<int>(count)};
}

// What is only moved goes as bytes where MPI does not know its dtype.
Elements moved(const Group& group, const Buffer& x) {
    const Handle dtype = group.mpi->constants.dtypes[static_cast<int>(x.dtype)];
    return dtype ? of(dtype, x.count) : of(group.mpi->constants.byte, x.nbytes());
}

Elements added(const Group& group, const Buffer& x, const char* call) {
    const Handle dtype = group.mpi->constants.dtypes[static_cast<int>(x.dtype)];
    if (!dtype) throw std::invalid_argument(std::string(call) + " does not know " + name_of(x.dtype));
    require_aligned(x, "add");
    return of(dtype, x.count);
}

bool is_root(const Group& group, int root) {
    if (root < 0 || root >= group.size)
        throw std::invalid_argument("no root " + std::to_string(root) + " among " + std::to_string(group.size));
    return root == group.rank;
}

// Memory that is the same, or apart, as MPI wants it.
void require_pair(const Buffer& whole, const Buffer& part, int parts, const char* verb) {
    require_rows(whole, part, parts, verb);
    require_apart(whole, part, verb);
}

const void* in_place(const Group& group, const Buffer& x, const Buffer& out) {
    return x.data == out.data ? reinterpret_cast<const void*>(group.mpi->constants.in_place) : x.data;
}

}  // namespace

void all_reduce(const Group& group, const Buffer& x, const Buffer& out) {
    const Mpi& mpi = *group.mpi;
    const Elements e = added(group, x, "MPI_Allreduce");
    added(group, out, "MPI_Allreduce");
    require_pair(x, out, 1, "all_reduce");
    mpi.check(mpi.Allreduce(in_place(group, x, out), out.data, e.count, e.dtype, mpi.constants.sum, group.comm),
              "MPI_Allreduce");
}

void reduce_scatter(const Group& group, const Buffer& x, const Buffer& out) {
    const Mpi& mpi = *group.mpi;
    const Elements e = added(group, out, "MPI_Reduce_scatter_block");
    added(group, x, "MPI_Reduce_scatter_block");
    require_pair(x, out, group.size, "reduce_scatter");
    mpi.check(mpi.Reduce_scatter_block(x.data, out.data, e.count, e.dtype, mpi.constants.sum, group.comm),
              "MPI_Reduce_scatter_block");
}

void all_gather(const Group& group, const Buffer& x, const Buffer& out) {
    const Mpi& mpi = *group.mpi;
    const Elements e = moved(group, x);
    require_pair(out, x, group.size, "all_gather");
    mpi.check(mpi.Allgather(x.data, e.count, e.dtype, out.data, e.count, e.dtype, group.comm), "MPI_Allgather");
}

void all_to_all(const Group& group, const Buffer& x, const Buffer& out) {
    const Mpi& mpi = *group.mpi;
    require_pair(x, out, 1, "all_to_all");
    const Buffer row{x.data, x.count / group.size, x.dtype};
    require_rows(x, row, group.size, "all_to_all");
    const Elements e = moved(group, row);
    mpi.check(mpi.Alltoall(in_place(group, x, out), e.count, e.dtype, out.data, e.count, e.dtype, group.comm),
              "MPI_Alltoall");
}

void broadcast(const Group& group, const Buffer& x, int root) {
    const Mpi& mpi = *group.mpi;
    is_root(group, root);
    const Elements e = moved(group, x);
    mpi.check(mpi.Bcast(x.data, e.count, e.dtype, root, group.comm), "MPI_Bcast");
}

void reduce(const Group& group, const Buffer& x, const Buffer& out, int root) {
    const Mpi& mpi = *group.mpi;
    const Elements e = added(group, x, "MPI_Reduce");
    if (is_root(group, root)) {
        added(group, out, "MPI_Reduce");
        require_pair(x, out, 1, "reduce");
    }
    const void* from = group.rank == root ? in_place(group, x, out) : x.data;
    mpi.check(mpi.Reduce(from, out.data, e.count, e.dtype, mpi.constants.sum, root, group.comm), "MPI_Reduce");
}

void gather(const Group& group, const Buffer& x, const Buffer& out, int root) {
    const Mpi& mpi = *group.mpi;
    const Elements e = moved(group, x);
    if (is_root(group, root)) require_pair(out, x, group.size, "gather");
    mpi.check(mpi.Gather(x.data, e.count, e.dtype, out.data, e.count, e.dtype, root, group.comm), "MPI_Gather");
}

void scatter(const Group& group, const Buffer& x, const Buffer& out, int root) {
    const Mpi& mpi = *group.mpi;
    const Elements e = moved(group, out);
    if (is_root(group, root)) require_pair(x, out, group.size, "scatter");
    mpi.check(mpi.Scatter(x.data, e.count, e.dtype, out.data, e.count, e.dtype, root, group.comm), "MPI_Scatter");
}

}  // namespace hpdl::mpi
