#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

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

const Loops& loops_with(const std::string& instructions) {
    for (const Loops& loops : all_loops()) {
        if (instructions == loops.instructions) return loops;
    }
    throw std::invalid_argument("this processor has no instructions " + instructions);
}

}  // namespace

void bind_reduce(nb::module_& m) {
    m.def(
        "instructions",
        [] {
            std::vector<std::string> names;
            for (const Loops& loops : all_loops()) names.emplace_back(loops.instructions);
            return names;
        },
        "The sets of instructions that sums can be taken with here, the one in use first.");
    m.def(
        "sum",
        [](const std::string& instructions, int dtype, const std::vector<std::uintptr_t>& sources,
           const std::vector<std::uintptr_t>& destinations, std::size_t count) {
            const std::vector<char*> src = pointers_of(sources), dst = pointers_of(destinations);
            const Loops& loops = loops_with(instructions);
            nb::gil_scoped_release release;
            loops.sum(static_cast<DType>(dtype), src.data(), static_cast<int>(src.size()), dst.data(),
                      static_cast<int>(dst.size()), count);
        },
        "instructions"_a, "dtype"_a, "sources"_a, "destinations"_a, "count"_a,
        "Add `count` elements at the addresses `sources`, store the sums at all `destinations`.");
}

}  // namespace hpdl
