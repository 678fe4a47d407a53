#include "bind.h"
#include "mpi_collectives.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

namespace {

// None, on a rank that has no such tensor: no memory, of no elements.
Buffer buffer_or_none(nb::handle x, const char* verb, bool writable) {
    return x.is_none() ? Buffer{nullptr, 0, DType::uint8} : buffer_of(x, verb, writable);
}

template <void (*collective)(const Group&, const Buffer&, const Buffer&)>
void among_all(const Group& group, nb::handle x, nb::handle out) {
    const Buffer from = buffer_of(x, "read", false), to = buffer_of(out, "write", true);
    nb::gil_scoped_release release;
    collective(group, from, to);
}

template <void (*collective)(const Group&, const Buffer&, const Buffer&, int)>
void with_root(const Group& group, nb::handle x, nb::handle out, int root) {
    const Buffer from = buffer_or_none(x, "read", false), to = buffer_or_none(out, "write", true);
    nb::gil_scoped_release release;
    collective(group, from, to, root);
}

void broadcast(const Group& group, nb::handle x, int root) {
    const Buffer buffer = buffer_of(x, "broadcast", true);
    nb::gil_scoped_release release;
    mpi::broadcast(group, buffer, root);
}

}  // namespace

void bind_mpi_collectives(nb::module_& m) {
    nb::module_ mpi = m.def_submodule("mpi", "The MPI library's own collectives, which block: no signal reaches them.");
    mpi.def("all_reduce", &among_all<mpi::all_reduce>, "group"_a, "x"_a, "out"_a);
    mpi.def("reduce_scatter", &among_all<mpi::reduce_scatter>, "group"_a, "x"_a, "out"_a);
    mpi.def("all_gather", &among_all<mpi::all_gather>, "group"_a, "x"_a, "out"_a);
    mpi.def("all_to_all", &among_all<mpi::all_to_all>, "group"_a, "x"_a, "out"_a);
    mpi.def("broadcast", &broadcast, "group"_a, "x"_a, "root"_a);
    mpi.def("reduce", &with_root<mpi::reduce>, "group"_a, "x"_a, "out"_a.none(), "root"_a);
    mpi.def("gather", &with_root<mpi::gather>, "group"_a, "x"_a, "out"_a.none(), "root"_a);
    mpi.def("scatter", &with_root<mpi::scatter>, "group"_a, "x"_a.none(), "out"_a, "root"_a);
}

}  // namespace hpdl
