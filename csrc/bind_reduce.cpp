#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind.h"
#include "reduce.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

namespace {

const Loops& loops_with(const std::string& instructions) {
    for (const Loops& loops : all_loops()) {
        if (instructions == loops.instructions) return loops;
    }
    throw std::invalid_argument("this processor has no instructions " + instructions);
}

// A sum of tensors that is taken again and again: everything about them is looked at once.
class Sum {
  public:
    Sum(const std::string& instructions, const nb::list& sources, const nb::list& destinations)
        : loops_(loops_with(instructions)), tensors_(nb::make_tuple(nb::tuple(sources), nb::tuple(destinations))) {
        const std::vector<Buffer> from = buffers_of(sources, false), to = buffers_of(destinations, true);
        if (from.empty() || to.empty()) throw std::invalid_argument("a sum needs a source and a destination");
        count_ = from[0].count;
        dtype_ = from[0].dtype;
        for (const std::vector<Buffer>* buffers : {&from, &to}) {
            for (const Buffer& x : *buffers) {
                if (x.count == count_ && x.dtype == dtype_) continue;
                throw std::invalid_argument("cannot add " + describe(count_, dtype_) + " and " +
                                            describe(x.count, x.dtype));
            }
        }
        for (std::size_t i = 0; i < to.size(); i++) {
            for (const Buffer& x : from) require_apart(to[i], x, "add");
            for (std::size_t j = 0; j < i; j++) require_apart(to[i], to[j], "add");
        }
        for (const Buffer& x : from) sources_.push_back(x.data);
        for (const Buffer& x : to) destinations_.push_back(x.data);
    }

    void operator()() const { loops_.sum(dtype_, sources_, destinations_, count_); }

  private:
    static std::vector<Buffer> buffers_of(const nb::list& tensors, bool writable) {
        std::vector<Buffer> buffers;
        for (nb::handle x : tensors) {
            buffers.push_back(buffer_of(x, "add", writable));
            require_addable(buffers.back(), "add");
        }
        return buffers;
    }

    const Loops& loops_;
    nb::tuple tensors_;  // kept
    std::vector<char*> sources_, destinations_;
    std::size_t count_;
    DType dtype_;
};

}  // namespace

void bind_reduce(nb::module_& m) {
    m.def(
        "dtypes",
        [] {
            nb::list rows;
            for (const DTypeInfo& dtype : kDTypeInfo)
                rows.append(nb::make_tuple(dtype.name, dtype.nbytes, dtype.instead_of_sum ? dtype.instead_of_sum : ""));
            return rows;
        },
        "(name, bytes, what to do instead of a sum) of each dtype, as buffers.TABLE.");
    m.def(
        "instructions",
        [] {
            std::vector<std::string> names;
            for (const Loops& loops : all_loops()) names.emplace_back(loops.instructions);
            return names;
        },
        "The sets of instructions that sums can be taken with here, the one in use first.");
    nb::class_<Sum>(m, "Sum", "Adds the tensors `sources` and stores the sum to all `destinations`, at every call.")
        .def(nb::init<const std::string&, const nb::list&, const nb::list&>(), "instructions"_a, "sources"_a,
             "destinations"_a)
        .def("__call__", &Sum::operator(), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace hpdl
