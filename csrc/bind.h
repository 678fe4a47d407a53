// What the binding files share: one function for each header below, which module.cpp calls, and tensors as Buffers.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "agreement.h"
#include "dtype.h"
#include "ring.h"

namespace hpdl {

// What a rank means to do, as Python compares it: (name, count, index in buffers.DTYPES, root or -1) for each.
nanobind::list told(const std::vector<Call>& calls);

// The transfers of a ring: (op, peer, nbytes, t0_ns, t1_ns) for each.
nanobind::list told(const Ring& ring);

// The memory of a contiguous CPU torch tensor or NumPy array, in some 30 ns, without linking to either. Anything else
// raises the ValueError or TypeError of hpdl_lab.comm.buffers.buffer_of, which says what to do.
// verb: "send", "receive into", ... for its text. writable: the memory will be written.
Buffer buffer_of(nanobind::handle x, const char* verb, bool writable);

void bind_mpi_api(nanobind::module_& m);
void bind_mpi_collectives(nanobind::module_& m);
void bind_operation(nanobind::module_& m);
void bind_message(nanobind::module_& m);
void bind_agreement(nanobind::module_& m);
void bind_arrival(nanobind::module_& m);
void bind_shm_memory(nanobind::module_& m);
void bind_shm_group(nanobind::module_& m);
void bind_reduce(nanobind::module_& m);
void bind_ring(nanobind::module_& m);
void bind_progress(nanobind::module_& m);

}  // namespace hpdl
