#include "reduce.h"

#include "reduce_variants.h"

namespace hpdl {

namespace {

struct Variant {
    const char* name;
    decltype(&portable::sum) sum;
    decltype(&portable::widen) widen;
    decltype(&portable::narrow) narrow;
};

Variant choose() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("f16c"))
        return {"AVX-512", avx512::sum, avx512::widen, avx512::narrow};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
        return {"AVX2", avx2::sum, avx2::widen, avx2::narrow};
#endif
    return {"portable", portable::sum, portable::widen, portable::narrow};
}

const Variant& variant() {
    static const Variant chosen = choose();
    return chosen;
}

}  // namespace

void sum(DType dtype, char* const* src, int sources, char* const* dst, int destinations, std::size_t count) {
    variant().sum(dtype, src, sources, dst, destinations, count);
}

void widen(DType dtype, const char* from, float* to, std::size_t count) { variant().widen(dtype, from, to, count); }

void narrow(DType dtype, const float* from, char* to, std::size_t count) { variant().narrow(dtype, from, to, count); }

const char* instructions() { return variant().name; }

}  // namespace hpdl
