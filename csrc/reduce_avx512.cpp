#define HPDL_VARIANT avx512
#include "reduce_kernels.inc"
