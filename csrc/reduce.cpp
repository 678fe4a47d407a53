#include "reduce.h"

#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// All loops are compiled in this file, for each set of instructions by a pragma. target_clones would need fewer lines,
// but has no way to choose a set for a test, nor one to let AVX2 and AVX-512 convert float16: sums of 256 KiB of it
// took 1.3 to 7 times as long.
#define HPDL_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define HPDL_BEGIN_TARGET(isa) HPDL_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define HPDL_END_TARGET HPDL_PRAGMA(clang attribute pop)
#define HPDL_IVDEP HPDL_PRAGMA(clang loop vectorize(assume_safety))
#else
#define HPDL_BEGIN_TARGET(isa) HPDL_PRAGMA(GCC push_options) HPDL_PRAGMA(GCC target(isa))
#define HPDL_END_TARGET HPDL_PRAGMA(GCC pop_options)
#define HPDL_IVDEP HPDL_PRAGMA(GCC ivdep)
#endif

#define HPDL_ISA portable
#define HPDL_F16C 0
#include "reduce_kernels.inc"
#undef HPDL_ISA

#if defined(__x86_64__)
#undef HPDL_F16C
#define HPDL_F16C 1

HPDL_BEGIN_TARGET("avx2,f16c")
#define HPDL_ISA avx2
#include "reduce_kernels.inc"
#undef HPDL_ISA
HPDL_END_TARGET

HPDL_BEGIN_TARGET("avx512f,avx512bw,f16c")
#define HPDL_ISA avx512
#include "reduce_kernels.inc"
#undef HPDL_ISA
HPDL_END_TARGET
#endif

namespace hpdl {

namespace {

std::vector<Loops> find_loops() {
    std::vector<Loops> found;
#if defined(__x86_64__)
    const bool f16c = __builtin_cpu_supports("f16c");
    if (f16c && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
        found.push_back({"AVX-512", avx512::sum, avx512::widen, avx512::narrow});
    if (f16c && __builtin_cpu_supports("avx2")) found.push_back({"AVX2", avx2::sum, avx2::widen, avx2::narrow});
#endif
    found.push_back({"portable", portable::sum, portable::widen, portable::narrow});
    return found;
}

}  // namespace

const std::vector<Loops>& all_loops() {
    static const std::vector<Loops> found = find_loops();
    return found;
}

}  // namespace hpdl
