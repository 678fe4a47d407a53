#include "bind.h"
#include "ring.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

void bind_ring(nb::module_& m) {
    nb::class_<Ring, Operation>(m, "Ring",
                                "A ring all-reduce under way, in segments. Its tensor must be kept until it is done.")
        .def(
            "__init__",
            [](Ring* self, const Group& group, nb::handle x, std::size_t segment) {
                new (self) Ring(group, buffer_of(x, "all_reduce", true), segment);
            },
            "group"_a, "x"_a, "segment"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
            "segment: bytes of a message at most.")
        .def_prop_ro("nbytes", &Ring::nbytes);
}

}  // namespace hpdl
