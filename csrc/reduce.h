// Sums of vectors, each input read once and each output written once. The loops are compiled for several sets of
// instructions; the widest that this processor has is used, and every choice gives the same bits.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "buffer.h"

namespace hpdl {

using Sources = std::span<char* const>;
using Destinations = std::span<char* const>;

struct Loops {
    const char* instructions;  // "AVX-512", "AVX2", "portable"

    // dst[k][j] = src[0][j] + src[1][j] + ... for every k, added in that order. 16-bit floats are added in float32 and
    // rounded once; integers wrap around. dtype: one that sums know, see DTypeInfo. A dst may be one of the src;
    // otherwise nothing overlaps. count: elements.
    void (*sum)(DType dtype, Sources src, Destinations dst, std::size_t count);

    // 16-bit floats to float32 and back (round to nearest even). Only bfloat16 and float16.
    void (*widen)(DType dtype, const char* from, float* to, std::size_t count);
    void (*narrow)(DType dtype, const float* from, char* to, std::size_t count);
};

// What this processor can execute, the best first.
const std::vector<Loops>& all_loops();

inline const Loops& loops() { return all_loops().front(); }

}  // namespace hpdl
