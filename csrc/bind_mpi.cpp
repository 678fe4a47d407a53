#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "consensus.h"
#include "mpi.h"
#include "ring.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

Transfers to_python(const Ring& ring) {
    Transfers all;
    for (const Ring::Transfer& t : ring.transfers()) {
        all.append(
            nb::make_tuple(t.sends ? "send" : "recv", t.sends ? ring.dst() : ring.src(), t.nbytes, t.t0_ns, t.t1_ns));
    }
    return all;
}

namespace {

// All numbers come as 64-bit words: negative ones as two's complement, as mpi4py does it with handles.
Constants constants_of(const nb::dict& description) {
    const auto integer = [&](const char* name) { return nb::cast<std::uintptr_t>(description[name]); };
    Constants c{};
    c.any_tag = static_cast<int>(integer("any_tag"));
    c.error_truncate = static_cast<int>(integer("error_truncate"));
    c.in_place = integer("in_place");
    c.request_null = integer("request_null");
    c.byte = integer("byte");
    c.sum = integer("sum");
    c.status_nbytes = integer("status_nbytes");
    c.tag_offset = integer("tag_offset");
    for (int i = 0; i < kDTypes; i++) {
        const char* name = kDTypeInfo[i].name;
        c.dtypes[i] = description.contains(name) ? integer(name) : 0;
    }
    return c;
}

// Python looks at signals when a call returns, and may then forget what it returned: so it is kept before that.
void hold(nb::handle work, Message&& message) { nb::setattr(work, "message", nb::cast(std::move(message))); }

// Whatever cannot hold a message must say so before MPI has been given the memory.
void require_holder(nb::handle work) { nb::setattr(work, "message", nb::none()); }

template <void (*collective)(const Group&, const Buffer&, const Buffer&)>
void mpi_among_all(const Group& group, nb::handle x, nb::handle out) {
    const Buffer from = buffer_of(x, "read", false), to = buffer_of(out, "write", true);
    nb::gil_scoped_release release;
    collective(group, from, to);
}

template <void (*collective)(const Group&, const Buffer&, const Buffer&, int)>
void mpi_with_root(const Group& group, nb::handle x, nb::handle out, int root) {
    const Buffer from = buffer_or_none(x, "read", false), to = buffer_or_none(out, "write", true);
    nb::gil_scoped_release release;
    collective(group, from, to, root);
}

void mpi_broadcast(const Group& group, nb::handle x, int root) {
    const Buffer buffer = buffer_of(x, "broadcast", true);
    nb::gil_scoped_release release;
    mpi::broadcast(group, buffer, root);
}

void bind_library(nb::module_& m) {
    nb::exception<MpiError>(m, "MpiError", PyExc_RuntimeError);
    nb::class_<Mpi>(m, "Mpi", "The MPI library that mpi4py has loaded.")
        .def(
            "__init__",
            [](Mpi* self, const std::string& loaded_by, int rank, const nb::dict& constants) {
                new (self) Mpi(loaded_by, rank, constants_of(constants));
            },
            "loaded_by"_a, "rank"_a, "constants"_a);
    nb::class_<Group>(m, "Group", "A communicator and its inner duplicate, by their handles.")
        .def(
            "__init__",
            [](Group* self, const Mpi& mpi, Handle comm, Handle inner, int rank, int size) {
                if (size < 1 || rank < 0 || rank >= size)
                    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size));
                new (self) Group{&mpi, comm, inner, rank, size};
            },
            "mpi"_a, "comm"_a, "inner"_a, "rank"_a, "size"_a, nb::keep_alive<1, 2>())
        .def_ro("comm", &Group::comm)
        .def_ro("inner", &Group::inner);
}

struct Collectives {};

void bind_collectives(nb::module_& m) {
    // A class, not a module: then one stub describes all.
    nb::class_<Collectives>(m, "mpi", "The MPI library's own collectives, which block: no signal reaches them.")
        .def_static("all_reduce", &mpi_among_all<mpi::all_reduce>, "group"_a, "x"_a, "out"_a)
        .def_static("reduce_scatter", &mpi_among_all<mpi::reduce_scatter>, "group"_a, "x"_a, "out"_a)
        .def_static("all_gather", &mpi_among_all<mpi::all_gather>, "group"_a, "x"_a, "out"_a)
        .def_static("all_to_all", &mpi_among_all<mpi::all_to_all>, "group"_a, "x"_a, "out"_a)
        .def_static("broadcast", &mpi_broadcast, "group"_a, "x"_a, "root"_a)
        .def_static("reduce", &mpi_with_root<mpi::reduce>, "group"_a, "x"_a, "out"_a.none(), "root"_a)
        .def_static("gather", &mpi_with_root<mpi::gather>, "group"_a, "x"_a, "out"_a.none(), "root"_a)
        .def_static("scatter", &mpi_with_root<mpi::scatter>, "group"_a, "x"_a.none(), "out"_a, "root"_a);
}

void bind_operations(nb::module_& m) {
    nb::class_<Message, Operation>(m, "Message", "One message under way. Its tensor must be kept until it is done.")
        .def_prop_ro("nbytes", &Message::nbytes)
        .def_prop_ro(
            "sent",
            [](const Message& self) -> std::optional<std::pair<std::size_t, int>> {
                if (!self.sent()) return std::nullopt;
                return std::pair(self.sent()->count, static_cast<int>(self.sent()->dtype));
            },
            "(count, index in buffers.DTYPES) of what had been sent, if it was not what was expected; else None.")
        .def("cancel", &Message::cancel, "Give up; true when MPI will not touch the tensor again.");
    m.def(
        "send",
        [](nb::handle work, Group& group, nb::handle x, int dst) {
            require_holder(work);
            hold(work, Message::send(group, buffer_of(x, "send", false), dst));
        },
        "work"_a, "group"_a, "x"_a, "dst"_a, "Begin to send `x`, as `work.message`. `work` keeps `x` and `group`.");
    m.def(
        "receive",
        [](nb::handle work, const Group& group, nb::handle x, int src) {
            require_holder(work);
            hold(work, Message::receive(group, buffer_of(x, "receive into", true), src));
        },
        "work"_a, "group"_a, "x"_a, "src"_a,
        "Begin to receive into `x`, as `work.message`. `work` keeps `x` and `group`.");
    nb::class_<Consensus, Operation>(m, "Consensus", "All ranks exchange their calls, and a few bytes, through MPI.")
        .def(
            "__init__",
            [](Consensus* self, const Group& group, const Call& call, const nb::bytes& note) {
                new (self) Consensus(group, call, std::string(note.c_str(), note.size()));
            },
            "group"_a, "call"_a, "note"_a, nb::keep_alive<1, 2>())
        .def("notes", [](const Consensus& self) {
            nb::typed<nb::list, nb::bytes> notes;
            for (const std::string& note : self.notes()) notes.append(nb::bytes(note.data(), note.size()));
            return notes;
        });
    nb::class_<Duplicates, Operation>(m, "Duplicates", "Two duplicates of a communicator in the making.")
        .def(nb::init<const Mpi&, Handle>(), "mpi"_a, "comm"_a, nb::keep_alive<1, 2>())
        .def_prop_ro("first", &Duplicates::first)
        .def_prop_ro("second", &Duplicates::second);
    nb::class_<Rendezvous, Operation>(m, "Rendezvous", "Some ranks wait until all of them are here.")
        .def(nb::init<const Group&, const std::vector<int>&, int>(), "group"_a, "ranks"_a, "number"_a,
             nb::keep_alive<1, 2>())
        .def("give_up", &Rendezvous::give_up, "seconds"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Stop waiting; true if that is too late, because the others go on and this rank has to.");
    nb::class_<Ring, Operation>(m, "Ring",
                                "A ring all-reduce under way, in segments. Its tensor must be kept until it is done.")
        .def(
            "__init__",
            [](Ring* self, const Group& group, nb::handle x, std::size_t segment, bool traced) {
                new (self) Ring(group, buffer_of(x, "all_reduce", true), segment, traced);
            },
            "group"_a, "x"_a, "segment"_a, "traced"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
            "segment: bytes of a message at most. traced: keep `transfers`.")
        .def_prop_ro("nbytes", &Ring::nbytes)
        .def(
            "transfers", [](const Ring& self) { return to_python(self); },
            "(op, peer, nbytes, t0_ns, t1_ns) of each step's chunk sent and received; after completion, if traced.");
}

}  // namespace

void bind_mpi(nb::module_& m) {
    bind_library(m);
    bind_collectives(m);
    bind_operations(m);
}

}  // namespace hpdl
