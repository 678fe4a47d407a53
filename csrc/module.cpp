#include "bind.h"

NB_MODULE(_core, m) {
    m.doc() = "Messages over whichever MPI is loaded, and collectives in shared memory. Nothing here blocks for long.";
    nanobind::set_leak_warnings(false);  // what a notebook still holds when it ends is no leak
    hpdl::bind_mpi_api(m);
    hpdl::bind_mpi_collectives(m);
    hpdl::bind_operation(m);
    hpdl::bind_message(m);
    hpdl::bind_agreement(m);
    hpdl::bind_arrival(m);
    hpdl::bind_shm_memory(m);
    hpdl::bind_shm_group(m);
    hpdl::bind_reduce(m);
    hpdl::bind_ring(m);
    hpdl::bind_progress(m);
}
