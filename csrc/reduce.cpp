#include "reduce.h"

#include "reduce_variants.h"

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
