#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "shm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

namespace {

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

Bytes bytes_of(const std::shared_ptr<SharedMemory>& memory, std::size_t offset, std::size_t nbytes) {
    memory->require_inside(offset, nbytes);
    auto* owner = new std::shared_ptr<SharedMemory>(memory);  // mapped for as long as the array lives
    nb::capsule keep(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<SharedMemory>*>(p); });
    return Bytes(memory->data() + offset, {nbytes}, keep);
}

// Start a collective and wait for it in the same call, because a small one takes less than a second call.
template <typename Start>
bool complete(ShmGroup& group, double seconds, bool oversubscribed, Start start) {
    nb::gil_scoped_release release;
    start();
    return wait(group, seconds, 0, oversubscribed);
}

bool all_reduce(ShmGroup& group, nb::handle x, double seconds, bool oversubscribed) {
    const Buffer buffer = buffer_of(x, "all_reduce", true);
    return complete(group, seconds, oversubscribed, [&] { group.start_all_reduce(buffer); });
}

bool broadcast(ShmGroup& group, nb::handle x, int root, double seconds, bool oversubscribed) {
    const Buffer buffer = buffer_of(x, "broadcast", true);
    return complete(group, seconds, oversubscribed, [&] { group.start_broadcast(buffer, root); });
}

template <void (ShmGroup::*start)(const Buffer& x, const Buffer& out)>
bool among_all(ShmGroup& group, nb::handle x, nb::handle out, double seconds, bool oversubscribed) {
    const Buffer from = buffer_of(x, "read", false), to = buffer_of(out, "write to", true);
    return complete(group, seconds, oversubscribed, [&] { (group.*start)(from, to); });
}

// x or out may be None if it is the root's alone.
template <void (ShmGroup::*start)(const Buffer& x, const Buffer& out, int root)>
bool with_root(ShmGroup& group, nb::handle x, nb::handle out, int root, double seconds, bool oversubscribed) {
    const Buffer from = buffer_or_none(x, "read", false), to = buffer_or_none(out, "write to", true);
    return complete(group, seconds, oversubscribed, [&] { (group.*start)(from, to, root); });
}

bool barrier(ShmGroup& group, const Call& call, double seconds, bool oversubscribed) {
    return complete(group, seconds, oversubscribed, [&] { group.start_barrier(call); });
}

}  // namespace

void bind_shm(nb::module_& m) {
    nb::class_<SharedMemory>(m, "SharedMemory", "Memory of all ranks of a machine, freed with the last of them.")
        .def_static("create", &SharedMemory::create, "nbytes"_a)
        .def_static("open", &SharedMemory::open, "name"_a, "nbytes"_a)
        .def("reserve", &SharedMemory::reserve, "offset"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("seal", &SharedMemory::seal)
        .def_prop_ro("name", &SharedMemory::name)
        .def_prop_ro("nbytes", &SharedMemory::nbytes)
        .def_prop_ro("address", [](const SharedMemory& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
        .def("array", &bytes_of, "offset"_a, "nbytes"_a, "The bytes as a NumPy array, which keeps the memory mapped.");

    nb::class_<ShmGroup, Operation>(m, "ShmGroup", "Ranks that share memory. Every collective returns true when done.")
        .def(nb::init<std::shared_ptr<SharedMemory>, int, int, bool>(), "memory"_a, "rank"_a, "size"_a,
             "takes_turns"_a = false)
        .def_static("nbytes_for", &ShmGroup::nbytes_for, "size"_a)
        .def_static("seats_nbytes_for", &ShmGroup::seats_nbytes_for, "size"_a)
        .def("add", &ShmGroup::add, "memory"_a, "part"_a)
        .def("all_reduce", &all_reduce, "x"_a, "seconds"_a, "oversubscribed"_a)
        .def("broadcast", &broadcast, "x"_a, "root"_a, "seconds"_a, "oversubscribed"_a)
        .def("all_gather", &among_all<&ShmGroup::start_all_gather>, "x"_a, "out"_a, "seconds"_a, "oversubscribed"_a)
        .def("reduce_scatter", &among_all<&ShmGroup::start_reduce_scatter>, "x"_a, "out"_a, "seconds"_a,
             "oversubscribed"_a)
        .def("all_to_all", &among_all<&ShmGroup::start_all_to_all>, "x"_a, "out"_a, "seconds"_a, "oversubscribed"_a)
        .def("reduce", &with_root<&ShmGroup::start_reduce>, "x"_a, "out"_a.none(), "root"_a, "seconds"_a,
             "oversubscribed"_a)
        .def("gather", &with_root<&ShmGroup::start_gather>, "x"_a, "out"_a.none(), "root"_a, "seconds"_a,
             "oversubscribed"_a)
        .def("scatter", &with_root<&ShmGroup::start_scatter>, "x"_a.none(), "out"_a, "root"_a, "seconds"_a,
             "oversubscribed"_a)
        .def_static(
            "path",
            [](int size, bool takes_turns) {
                return takes_turns
                           ? describe(kPaths[kFewestBarriers]) + " (not measured: ranks take turns on their cores)"
                           : Choice::of(size).text();
            },
            "size"_a, "takes_turns"_a,
            "How this process, as rank 0 of so many, has found that tensors of any origin are best staged.")
        .def_static(
            "forget", [](int size) { Choice::of(size).forget(); }, "size"_a,
            "Forget what was measured, and measure again. For tests.")
        .def_static(
            "play", [](int size, std::int64_t ns) { Choice::of(size).play(ns); }, "size"_a, "ns"_a,
            "Play a state of the machine in which probes take so long; 0: the true one. For tests.")
        .def("barrier", &barrier, "call"_a, "seconds"_a, "oversubscribed"_a)
        .def_prop_ro("nbytes", &ShmGroup::nbytes, "Of the tensor of the last collective.");
}

}  // namespace hpdl
