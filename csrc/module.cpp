#include "bind.h"

NB_MODULE(_core, m) {
    m.doc() = "Messages over whichever MPI is loaded, and collectives in shared memory. Nothing here blocks for long.";
    nanobind::set_leak_warnings(false);  // what a notebook still holds when it ends is no leak
    hpdl::bind_progress(m);
    hpdl::bind_mpi(m);
    hpdl::bind_shm(m);
    hpdl::bind_reduce(m);
}
