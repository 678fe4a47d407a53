// What the binding files share: one function for each of them, which module.cpp calls, and tensors as Buffers.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "buffer.h"

namespace hpdl {

class Ring;

// What a rank means to do, as Python compares it: (name, count, index in buffers.DTYPES, root or -1) for each.
using Calls = nanobind::typed<nanobind::list, nanobind::typed<nanobind::tuple, nanobind::str, int, int, int>>;
Calls to_python(const std::vector<Call>& calls);

// The transfers of a ring: (op, peer, nbytes, t0_ns, t1_ns) for each.
using Transfers = nanobind::typed<nanobind::list, nanobind::typed<nanobind::tuple, nanobind::str, int, int, int, int>>;
Transfers to_python(const Ring& ring);

// The memory of a contiguous CPU torch tensor or NumPy array, without linking to either. Anything else raises the
// ValueError or TypeError of hpdl_lab.comm.buffers.buffer_of, which says what to do.
// verb: "send", "receive into", ... for its text. writable: the memory will be written.
Buffer buffer_of(nanobind::handle x, const char* verb, bool writable);

// The same; no elements for None, of a rank that has no such tensor.
Buffer buffer_or_none(nanobind::handle x, const char* verb, bool writable);

void bind_progress(nanobind::module_& m);
void bind_mpi(nanobind::module_& m);
void bind_shm(nanobind::module_& m);
void bind_reduce(nanobind::module_& m);

}  // namespace hpdl
