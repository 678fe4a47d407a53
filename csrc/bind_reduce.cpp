#include <nanobind/stl/vector.h>

#include "bind.h"
#include "reduce.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

namespace {

std::vector<char*> pointers_of(const std::vector<std::uintptr_t>& addresses) {
    std::vector<char*> pointers;
    for (std::uintptr_t address : addresses) pointers.push_back(reinterpret_cast<char*>(address));
    return pointers;
}

}  // namespace

void bind_reduce(nb::module_& m) {
    m.def("instructions", &instructions, "The instructions that this processor adds with: AVX-512, AVX2 or portable.");
    m.def("sum",
          [](int dtype, const std::vector<std::uintptr_t>& sources, const std::vector<std::uintptr_t>& destinations,
             std::size_t count) {
              const std::vector<char*> src = pointers_of(sources), dst = pointers_of(destinations);
              nb::gil_scoped_release release;
              sum(static_cast<DType>(dtype), src.data(), static_cast<int>(src.size()), dst.data(),
                  static_cast<int>(dst.size()), count);
          },
          "dtype"_a, "sources"_a, "destinations"_a, "count"_a,
          "Add `count` elements at the addresses `sources`, store the sums at all `destinations`.");
}

}  // namespace hpdl
