#include <nanobind/stl/vector.h>

#include "arrival.h"
#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

void bind_arrival(nb::module_& m) {
    nb::class_<Arrival, Operation>(m, "Arrival", "Some ranks wait until all of them are here.")
        .def(nb::init<const Group&, const std::vector<int>&, int>(), "group"_a, "ranks"_a, "number"_a,
             nb::keep_alive<1, 2>())
        .def("give_up", &Arrival::give_up, "seconds"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Stop waiting; true where that is too late, because the others go on and this rank has to.");
}

}  // namespace hpdl
