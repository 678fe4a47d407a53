#include <nanobind/stl/string.h>

#include "agreement.h"
#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

nb::list told(const std::vector<Call>& calls) {
    nb::list list;
    for (const Call& call : calls)
        list.append(nb::make_tuple(call.name, call.count, static_cast<int>(call.dtype), call.root));
    return list;
}

void bind_agreement(nb::module_& m) {
    nb::class_<Call>(m, "Call", "What a rank is about to do; all ranks must mean the same.")
        .def(
            "__init__",
            [](Call* self, const char* name, std::size_t count, int dtype, int root) {
                new (self) Call(Call::of(name, count, dtype_at(dtype), root));
            },
            "name"_a, "count"_a, "dtype"_a, "root"_a, "dtype: index in buffers.DTYPES. root: -1 where there is none.");
    nb::class_<Agreement, Operation>(m, "Agreement", "All ranks exchange their calls, and a few bytes, through MPI.")
        .def(
            "__init__",
            [](Agreement* self, const Group& group, const Call& call, const nb::bytes& note) {
                new (self) Agreement(group, call, std::string(note.c_str(), note.size()));
            },
            "group"_a, "call"_a, "note"_a, nb::keep_alive<1, 2>())
        .def(
            "calls", [](const Agreement& self) { return told(self.calls()); }, "What every rank meant, once all came.")
        .def("notes", [](const Agreement& self) {
            nb::list notes;
            for (const std::string& note : self.notes()) notes.append(nb::bytes(note.data(), note.size()));
            return notes;
        });
    nb::class_<Duplicates, Operation>(m, "Duplicates", "Two duplicates of a communicator in the making.")
        .def(nb::init<const Mpi&, Handle>(), "mpi"_a, "comm"_a, nb::keep_alive<1, 2>())
        .def_prop_ro("first", &Duplicates::first)
        .def_prop_ro("second", &Duplicates::second);
}

}  // namespace hpdl
