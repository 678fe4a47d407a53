#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "shm_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

namespace {

// Each starts a collective and waits for it in the same call, because a small one takes less than a second call.

bool all_reduce(ShmGroup& group, nb::handle x, double seconds, bool crowded) {
    const Buffer buffer = buffer_of(x, "all_reduce", true);
    nb::gil_scoped_release release;
    group.start_all_reduce(buffer);
    return wait(group, seconds, 0, crowded);
}

bool broadcast(ShmGroup& group, nb::handle x, int root, double seconds, bool crowded) {
    const Buffer buffer = buffer_of(x, "broadcast", true);
    nb::gil_scoped_release release;
    group.start_broadcast(buffer, root);
    return wait(group, seconds, 0, crowded);
}

template <void (ShmGroup::*start)(const Buffer& x, const Buffer& out)>
bool among_all(ShmGroup& group, nb::handle x, nb::handle out, double seconds, bool crowded) {
    const Buffer from = buffer_of(x, "read", false), to = buffer_of(out, "write to", true);
    nb::gil_scoped_release release;
    (group.*start)(from, to);
    return wait(group, seconds, 0, crowded);
}

// x or out may be None where it is the root's alone.
template <void (ShmGroup::*start)(const Buffer& x, const Buffer& out, int root)>
bool with_root(ShmGroup& group, nb::handle x, nb::handle out, int root, double seconds, bool crowded) {
    const Buffer nothing{nullptr, 0, DType::uint8};
    const Buffer from = x.is_none() ? nothing : buffer_of(x, "read", false);
    const Buffer to = out.is_none() ? nothing : buffer_of(out, "write to", true);
    nb::gil_scoped_release release;
    (group.*start)(from, to, root);
    return wait(group, seconds, 0, crowded);
}

bool meet(ShmGroup& group, const Call& call, double seconds, bool crowded) {
    nb::gil_scoped_release release;
    group.start_meeting(call);
    return wait(group, seconds, 0, crowded);
}

}  // namespace

void bind_shm_group(nb::module_& m) {
    nb::class_<ShmGroup, Operation>(m, "ShmGroup", "Ranks that share memory. Every collective returns true when done.")
        .def(nb::init<std::shared_ptr<SharedMemory>, int, int>(), "memory"_a, "rank"_a, "size"_a)
        .def_static("nbytes_for", &ShmGroup::nbytes_for, "size"_a)
        .def("add", &ShmGroup::add, "memory"_a, "part"_a)
        .def("all_reduce", &all_reduce, "x"_a, "seconds"_a, "crowded"_a)
        .def("broadcast", &broadcast, "x"_a, "root"_a, "seconds"_a, "crowded"_a)
        .def("all_gather", &among_all<&ShmGroup::start_all_gather>, "x"_a, "out"_a, "seconds"_a, "crowded"_a)
        .def("reduce_scatter", &among_all<&ShmGroup::start_reduce_scatter>, "x"_a, "out"_a, "seconds"_a, "crowded"_a)
        .def("all_to_all", &among_all<&ShmGroup::start_all_to_all>, "x"_a, "out"_a, "seconds"_a, "crowded"_a)
        .def("reduce", &with_root<&ShmGroup::start_reduce>, "x"_a, "out"_a.none(), "root"_a, "seconds"_a, "crowded"_a)
        .def("gather", &with_root<&ShmGroup::start_gather>, "x"_a, "out"_a.none(), "root"_a, "seconds"_a, "crowded"_a)
        .def("scatter", &with_root<&ShmGroup::start_scatter>, "x"_a.none(), "out"_a, "root"_a, "seconds"_a, "crowded"_a)
        .def("meet", &meet, "call"_a, "seconds"_a, "crowded"_a)
        .def_prop_ro("nbytes", &ShmGroup::nbytes, "Of the tensor of the last collective.")
        .def(
            "calls", [](const ShmGroup& self) { return told(self.calls()); },
            "What every rank meant, where they disagreed in the last collective; else nothing.")
        .def("missing", &ShmGroup::missing, "The ranks that have not come to the meeting at which this one waits.");
}

}  // namespace hpdl
