#define HPDL_VARIANT avx2
#include "reduce_kernels.inc"
