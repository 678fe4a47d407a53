#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "tasks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

namespace {

// Python objects that live as long as a task, whose last owner must hold the interpreter's lock: see forget_ended.
std::shared_ptr<void> hold(const nb::object& group, const nb::object& x) {
    return std::make_shared<nb::tuple>(nb::make_tuple(group, x));
}

std::shared_ptr<Task> all_reduce_in_memory(Progress& progress, const nb::object& group, const nb::object& x) {
    progress.forget_ended();
    Parts parts = all_reduce_in_memory(nb::cast<ShmGroup&>(group), buffer_of(x, "all_reduce", true));
    return progress.add(std::move(parts), hold(group, x));
}

std::shared_ptr<Task> all_reduce_by_messages(Progress& progress, const nb::object& group, const Call& call,
                                             const nb::object& x, std::size_t segment, bool traced) {
    progress.forget_ended();
    Parts parts =
        all_reduce_by_messages(nb::cast<const Group&>(group), call, buffer_of(x, "all_reduce", true), segment, traced);
    return progress.add(std::move(parts), hold(group, x));
}

nb::list transfers(const Task& task) {
    const Ring* ring = task.has_ended() ? ring_of(task) : nullptr;
    return ring ? told(*ring) : nb::list();
}

}  // namespace

void bind_progress(nb::module_& m) {
    nb::class_<Task, Operation>(m, "Task", "What goes on beside a rank. Who waits for it also advances it.")
        .def(
            "wait",
            [](Task& self, double seconds, double nap_s, bool crowded) {
                return wait_for(self.progress_of(), self, seconds, nap_s, crowded);
            },
            "seconds"_a, "nap_s"_a, "crowded"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "wait_among",
            [](Task& self, double seconds, double nap_s, bool crowded, const std::vector<Operation*>& others) {
                return wait_for(self.progress_of(), self, seconds, nap_s, crowded, others);
            },
            "seconds"_a, "nap_s"_a, "crowded"_a, "others"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("ended", &Task::has_ended)
        .def_prop_ro("progress", &Task::moved)
        .def("missing", &Task::missing, "The ranks that it waits for, as far as that is known.")
        .def(
            "calls", [](const Task& self) { return self.has_ended() ? told(self.calls()) : nb::list(); },
            "What every rank meant, where they disagreed; else nothing.")
        .def_prop_ro("t0_ns", [](const Task& self) { return self.has_ended() ? self.t0_ns() : 0; })
        .def_prop_ro("t1_ns", [](const Task& self) { return self.has_ended() ? self.t1_ns() : 0; })
        .def("transfers", &transfers, "Those of the ring, where there was one; after the end.");
    nb::class_<Progress>(m, "Progress", "A thread that advances tasks, one after the other, and needs no Python.")
        .def(nb::init<>())
        .def("all_reduce_in_memory",
             nb::overload_cast<Progress&, const nb::object&, const nb::object&>(&all_reduce_in_memory), "group"_a,
             "x"_a, nb::keep_alive<0, 1>(),
             "Append an all_reduce of a ShmGroup that nobody else uses until it has ended.")
        .def("all_reduce_by_messages",
             nb::overload_cast<Progress&, const nb::object&, const Call&, const nb::object&, std::size_t, bool>(
                 &all_reduce_by_messages),
             "group"_a, "call"_a, "x"_a, "segment"_a, "traced"_a, nb::keep_alive<0, 1>(),
             "Append a ring all_reduce, on which all ranks agree first; arguments of Ring.")
        .def("stop", &Progress::stop, nb::call_guard<nb::gil_scoped_release>(),
             "End the thread. Tasks that have not ended keep their memory as long as this lives; true where MPI may "
             "still "
             "write to that.");
}

}  // namespace hpdl
