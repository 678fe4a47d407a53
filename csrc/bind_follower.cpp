#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>

#include "bind.h"
#include "follower.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

namespace {

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool same) {
    if (!same) throw std::invalid_argument("the columns of a round have different lengths");
}

std::shared_ptr<Pattern> pattern_of(const Column<std::int64_t>& source, const Column<std::int64_t>& dest,
                                    const Column<double>& alpha, const std::vector<Column<std::int64_t>>& links) {
    require(dest.size() == source.size() && alpha.size() == source.size());
    std::vector<const std::int64_t*> columns;
    for (const Column<std::int64_t>& link : links) {
        require(link.size() == source.size());
        columns.push_back(link.data());
    }
    return std::make_shared<Pattern>(source.size(), source.data(), dest.data(), alpha.data(), columns);
}

Follower* follower_of(const Column<double>& clocks, std::int64_t links) {
    return new Follower(std::vector<double>(clocks.data(), clocks.data() + clocks.size()), links);
}

void add(Follower& self, const std::shared_ptr<Pattern>& pattern, const Column<double>& seconds,
         const std::optional<Column<bool>>& eager) {
    require(seconds.size() == pattern->ways.size() && (!eager || eager->size() == seconds.size()));
    nb::gil_scoped_release release;
    self.add(pattern, seconds.data(), eager ? eager->data() : nullptr);
}

nb::ndarray<nb::numpy, double, nb::ndim<1>> clocks(const Follower& self) {
    const std::vector<double>& clocks = self.clocks();
    auto* copy = new double[clocks.size()];
    nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<double*>(p); });
    std::copy(clocks.begin(), clocks.end(), copy);
    return {copy, {clocks.size()}, owner};
}

}  // namespace

void bind_follower(nb::module_& m) {
    nb::class_<Pattern>(m, "Pattern", "Who sends to whom in a round, and over which links.")
        .def(nb::new_(&pattern_of), "source"_a, "dest"_a, "alpha"_a, "links"_a);
    nb::class_<Follower>(m, "Follower", "Follows the messages of a schedule on a network, round after round.")
        .def(nb::new_(&follower_of), "clocks"_a, "links"_a)
        .def("add", &add, "pattern"_a, "seconds"_a, "eager"_a.none())
        .def("end", &Follower::end, nb::call_guard<nb::gil_scoped_release>())
        .def("clocks", &clocks, "When each rank has ended, or how far it is: s, a copy.")
        .def_prop_ro("held", &Follower::held, "Messages in memory.");
}

}  // namespace hpdl
