#include "bind.h"
#include "message.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl {

namespace {

// Python looks at signals when a call returns, and may then forget what it returned: so it is kept before that.
void hold(nb::handle work, Message&& message) { nb::setattr(work, "message", nb::cast(std::move(message))); }

// Whatever cannot hold a message must say so before MPI has been given the memory.
void require_holder(nb::handle work) { nb::setattr(work, "message", nb::none()); }

}  // namespace

void bind_message(nb::module_& m) {
    nb::class_<Message, Operation>(m, "Message", "One message under way. Its tensor must be kept until it is done.")
        .def_prop_ro("nbytes", &Message::nbytes)
        .def_prop_ro(
            "sent",
            [](const Message& self) -> nb::object {
                if (!self.sent()) return nb::none();
                return nb::make_tuple(self.sent()->count, static_cast<int>(self.sent()->dtype));
            },
            "(count, index in buffers.DTYPES) of what had been sent, where it was not what was expected; else None.")
        .def("cancel", &Message::cancel, "Give up; true when MPI will not touch the tensor again.");
    m.def(
        "send",
        [](nb::handle work, Group& group, nb::handle x, int to) {
            require_holder(work);
            hold(work, Message::send(group, buffer_of(x, "send", false), to));
        },
        "work"_a, "group"_a, "x"_a, "to"_a, "Begin to send `x`, as `work.message`. `work` keeps `x` and `group`.");
    m.def(
        "receive",
        [](nb::handle work, const Group& group, nb::handle x, int source) {
            require_holder(work);
            hold(work, Message::receive(group, buffer_of(x, "receive into", true), source));
        },
        "work"_a, "group"_a, "x"_a, "source"_a,
        "Begin to receive into `x`, as `work.message`. `work` keeps `x` and `group`.");
}

}  // namespace hpdl
