// Sums of vectors, each input read once and each output written once. The widest instructions of this processor are
// chosen when the program runs; every choice gives the same bits.
#pragma once

#include <cstddef>

#include "dtype.h"

namespace hpdl {

// dst[k][j] = src[0][j] + src[1][j] + ... for every k, added in that order. 16-bit floats are added in float32 and
// rounded once; integers wrap around. A dst may be one of the src; otherwise nothing overlaps. count: elements.
void sum(DType dtype, char* const* src, int sources, char* const* dst, int destinations, std::size_t count);

// 16-bit floats to float32 and back (round to nearest even). Only bfloat16 and float16.
void widen(DType dtype, const char* from, float* to, std::size_t count);
void narrow(DType dtype, const float* from, char* to, std::size_t count);

// "AVX-512", "AVX2" or "portable".
const char* instructions();

}  // namespace hpdl
