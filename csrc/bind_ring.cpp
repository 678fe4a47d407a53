#include "bind.h"
#include "ring.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

nb::list told(const Ring& ring) {
    nb::list all;
    for (const Ring::Transfer& t : ring.transfers()) {
        all.append(
            nb::make_tuple(t.sends ? "send" : "recv", t.sends ? ring.to() : ring.from(), t.nbytes, t.t0_ns, t.t1_ns));
    }
    return all;
}

void bind_ring(nb::module_& m) {
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
            "transfers", [](const Ring& self) { return told(self); },
            "(op, peer, nbytes, t0_ns, t1_ns) of each step's chunk sent and received; after completion, if traced.");
}

}  // namespace hpdl
