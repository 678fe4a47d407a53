// The functions of Loops (reduce.h), once for each set of instructions; reduce.cpp chooses.
#pragma once

#include <cstddef>

#include "dtype.h"

#define HPDL_DECLARE(variant)                                                                                    \
    namespace variant {                                                                                          \
    void sum(DType dtype, char* const* src, int sources, char* const* dst, int destinations, std::size_t count); \
    void widen(DType dtype, const char* from, float* to, std::size_t count);                                     \
    void narrow(DType dtype, const float* from, char* to, std::size_t count);                                    \
    }

namespace hpdl {
HPDL_DECLARE(portable)
HPDL_DECLARE(avx2)
HPDL_DECLARE(avx512)
}  // namespace hpdl

#undef HPDL_DECLARE
