#include "bind.h"
#include "message.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

void bind_message(nb::module_& m) {
    nb::class_<Message, Operation>(m, "Message", "One message under way. Its tensor must be kept until it is done.")
        .def_prop_ro("nbytes", &Message::nbytes)
        .def("cancel", &Message::cancel, "Give up; true when MPI will not touch the tensor again.");
    m.def(
        "send",
        [](Group& group, nb::handle x, int to) { return Message::send(group, buffer_of(x, "send", false), to); },
        "group"_a, "x"_a, "to"_a, nb::keep_alive<0, 1>());
    m.def(
        "receive",
        [](const Group& group, nb::handle x, int source) {
            return Message::receive(group, buffer_of(x, "receive into", true), source);
        },
        "group"_a, "x"_a, "source"_a, nb::keep_alive<0, 1>());
}

}  // namespace hpdl
