#include <nanobind/stl/string.h>

#include "bind.h"
#include "message.h"
#include "mpi_api.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

namespace {

// All numbers are told as 64-bit words: negative ones as two's complement, as mpi4py does it with handles.
Constants constants_of(const nb::dict& told) {
    const auto integer = [&](const char* name) { return nb::cast<std::uintptr_t>(told[name]); };
    Constants c{};
    c.any_tag = static_cast<int>(integer("any_tag"));
    c.error_truncate = static_cast<int>(integer("error_truncate"));
    c.in_place = integer("in_place");
    c.request_null = integer("request_null");
    c.byte = integer("byte");
    c.sum = integer("sum");
    c.status_nbytes = integer("status_nbytes");
    c.tag_offset = integer("tag_offset");
    for (int i = 0; i < kDTypes; i++) c.dtypes[i] = told.contains(kDTypeNames[i]) ? integer(kDTypeNames[i]) : 0;
    return c;
}

}  // namespace

void bind_mpi_api(nb::module_& m) {
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

}  // namespace hpdl
