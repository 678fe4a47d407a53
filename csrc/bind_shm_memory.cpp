#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "shm_memory.h"

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

}  // namespace

void bind_shm_memory(nb::module_& m) {
    nb::class_<SharedMemory>(m, "SharedMemory", "Memory of all ranks of a machine, which ends with the last of them.")
        .def_static(
            "create", [](std::size_t nbytes) { return std::make_shared<SharedMemory>(SharedMemory::create(nbytes)); },
            "nbytes"_a)
        .def_static(
            "open",
            [](const std::string& name, std::size_t nbytes) {
                return std::make_shared<SharedMemory>(SharedMemory::open(name, nbytes));
            },
            "name"_a, "nbytes"_a)
        .def("reserve", &SharedMemory::reserve, "offset"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("seal", &SharedMemory::seal)
        .def_prop_ro("name", &SharedMemory::name)
        .def_prop_ro("nbytes", &SharedMemory::nbytes)
        .def_prop_ro("address", [](const SharedMemory& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
        .def("array", &bytes_of, "offset"_a, "nbytes"_a, "The bytes as a NumPy array, which keeps the memory mapped.");
}

}  // namespace hpdl
