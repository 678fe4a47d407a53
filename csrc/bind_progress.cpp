#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "progress.h"
#include "ring.h"
#include "shm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

Calls to_python(const std::vector<Call>& calls) {
    Calls list;
    for (const Call& call : calls)
        list.append(nb::make_tuple(call.name, call.count, static_cast<int>(call.dtype), call.root));
    return list;
}

namespace {

DType dtype_at(int index) {
    if (index < 0 || index >= kDTypes)
        throw std::invalid_argument("dtype " + std::to_string(index) + " is none of 0 to " +
                                    std::to_string(kDTypes - 1));
    return static_cast<DType>(index);
}

// Python objects that live as long as a task, whose last owner must hold the interpreter's lock: see free_ended.
std::shared_ptr<void> hold(const nb::object& group, const nb::object& x) {
    return std::make_shared<nb::tuple>(nb::make_tuple(group, x));
}

std::shared_ptr<Task> in_memory(Progress& progress, const nb::object& group, const nb::object& x) {
    progress.free_ended();
    const Buffer buffer = buffer_of(x, "all_reduce", true);
    return progress.add(all_reduce_in_memory(nb::cast<ShmGroup&>(group), buffer), hold(group, x));
}

std::shared_ptr<Task> by_messages(Progress& progress, const nb::object& group, const Call& call, const nb::object& x,
                                  std::size_t segment, bool traced) {
    progress.free_ended();
    const Buffer buffer = buffer_of(x, "all_reduce", true);
    return progress.add(all_reduce_by_messages(nb::cast<const Group&>(group), call, buffer, segment, traced),
                        hold(group, x));
}

Transfers transfers(const Task& task) {
    const Ring* ring = dynamic_cast<const Ring*>(task.last());
    return ring ? to_python(*ring) : Transfers();
}

}  // namespace

void bind_progress(nb::module_& m) {
    nb::class_<Call>(m, "Call", "What a rank is about to do; all ranks must mean the same.")
        .def(
            "__init__",
            [](Call* self, const char* name, std::size_t count, int dtype, int root) {
                new (self) Call(Call::of(name, count, dtype_at(dtype), root));
            },
            "name"_a, "count"_a, "dtype"_a, "root"_a, "dtype: index in buffers.DTYPES. root: -1 if there is none.");
    nb::class_<Operation>(m, "Operation", "Something under way that depends on other ranks.")
        .def(
            "wait",
            [](Operation& self, double seconds, double nap_s, bool oversubscribed) {
                return wait(self, seconds, nap_s, oversubscribed);
            },
            "seconds"_a, "nap_s"_a, "oversubscribed"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Advance for `seconds` at most; true when done. nap_s: 0 spins, else sleep so long between looks at "
            "nothing new.")
        .def("wait_among", &wait, "seconds"_a, "nap_s"_a, "oversubscribed"_a, "others"_a,
             nb::call_guard<nb::gil_scoped_release>(),
             "`wait`, in which a list of other operations is advanced as well; what they raise, they raise again.")
        .def_prop_ro("progress", &Operation::progress, "Grows whenever a part has been done.")
        .def(
            "calls", [](const Operation& self) { return to_python(self.calls()); },
            "(name, count, index in buffers.DTYPES, root or -1) that every rank meant, if they disagreed; else [].")
        .def("missing", &Operation::missing, "The ranks that it waits for, as far as that is known.");
    nb::class_<Task, Operation>(m, "Task", "An operation in the background. A rank that waits for it also advances it.")
        .def_prop_ro("ended", &Task::has_ended)
        .def_prop_ro("t0_ns", &Task::t0_ns)
        .def_prop_ro("t1_ns", &Task::t1_ns)
        .def("transfers", &transfers, "Those of the ring, if there was one; after the end.");
    nb::class_<Progress>(m, "Progress", "A thread that advances tasks, one after the other, and needs no Python.")
        .def(nb::init<>())
        .def("all_reduce_in_memory", &in_memory, "group"_a, "x"_a, nb::keep_alive<0, 1>(),
             "Append an all_reduce of a ShmGroup that nobody else uses until it has ended.")
        .def("all_reduce_by_messages", &by_messages, "group"_a, "call"_a, "x"_a, "segment"_a, "traced"_a,
             nb::keep_alive<0, 1>(), "Append a ring all_reduce, for which all ranks first compare `call`; see Ring.")
        .def("stop", &Progress::stop, nb::call_guard<nb::gil_scoped_release>(),
             "End the thread. Tasks that have not ended keep their memory as long as this lives; true if MPI may still "
             "write to that.");
}

}  // namespace hpdl
