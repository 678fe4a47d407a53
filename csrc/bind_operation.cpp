#include <nanobind/stl/vector.h>

#include "bind.h"
#include "operation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

void bind_operation(nb::module_& m) {
    nb::class_<Operation>(m, "Operation", "Something under way that depends on other ranks.")
        .def(
            "wait",
            [](Operation& self, double seconds, double nap_s, bool crowded) {
                return wait(self, seconds, nap_s, crowded);
            },
            "seconds"_a, "nap_s"_a, "crowded"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Advance for `seconds` at most; true when done. nap_s: 0 spins, else sleep so long between looks at "
            "nothing new.")
        .def("wait_among", &wait, "seconds"_a, "nap_s"_a, "crowded"_a, "others"_a,
             nb::call_guard<nb::gil_scoped_release>(),
             "`wait`, in which a list of other operations is advanced as well; what they raise, they raise again.")
        .def_prop_ro("progress", &Operation::progress, "Grows whenever a part has been done.");
}

}  // namespace hpdl
