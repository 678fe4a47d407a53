#define HPDL_VARIANT portable
#include "reduce_kernels.inc"
