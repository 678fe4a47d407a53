// How elements are added: 16-bit floats widen to float and are rounded once, at the end; all others add as they are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hpdl::cuda {

template <typename T>
struct Element {
    using Sum = T;
    static __device__ Sum widen(T x) { return x; }
    static __device__ T round(Sum x) { return x; }
};

template <>
struct Element<__half> {
    using Sum = float;
    static __device__ Sum widen(__half x) { return __half2float(x); }
    static __device__ __half round(Sum x) { return __float2half_rn(x); }
};

template <>
struct Element<__nv_bfloat16> {
    using Sum = float;
    static __device__ Sum widen(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __nv_bfloat16 round(Sum x) { return __float2bfloat16_rn(x); }
};

// 16 bytes, the most that one instruction loads or stores.
template <typename T>
struct alignas(16) Packet {
    static constexpr int kElements = 16 / sizeof(T);
    T of[kElements];
};

template <typename T>
__device__ Packet<T> load_packet(const T* x) {
    const uint4 words = *reinterpret_cast<const uint4*>(x);
    Packet<T> packet;
    std::memcpy(&packet, &words, sizeof packet);
    return packet;
}

// As one value of 16 bytes: the elements, which were computed one by one, would else be stored one by one.
template <typename T>
__device__ void store_packet(T* x, const Packet<T>& packet) {
    unsigned words[4];
    std::memcpy(words, &packet, sizeof words);
    __stwb(reinterpret_cast<uint4*>(x), make_uint4(words[0], words[1], words[2], words[3]));
}

// Elements of x before the first one that lies on a 16-byte boundary, `n` at most.
template <typename T>
__host__ __device__ std::size_t before_packets(const T* x, std::size_t n) {
    const std::size_t off = reinterpret_cast<std::uintptr_t>(x) % sizeof(Packet<T>);
    const std::size_t lead = off ? (sizeof(Packet<T>) - off) / sizeof(T) : 0;
    return lead < n ? lead : n;
}

}  // namespace hpdl::cuda
