// The rungs of the ladder, lowest first. Every block of kThreads threads leaves one partial sum.
#pragma once

#include "element.cuh"

namespace hpdl::cuda {

constexpr int kThreads = 256;
constexpr int kLastThreads = 1024;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename T>
__device__ float load(const T* x, std::size_t i, std::size_t n) {
    return i < n ? Element<T>::widen(x[i]) : 0.0f;
}

// 1. Neighbors add, then neighbors of neighbors: threads that work stand between threads that do not, in every warp.
template <typename T>
__global__ void interleaved(const T* x, std::size_t n, float* partial) {
    __shared__ float sums[kThreads];
    const unsigned t = threadIdx.x;
    sums[t] = load(x, std::size_t{blockIdx.x} * kThreads + t, n);
    __syncthreads();
    for (unsigned distance = 1; distance < kThreads; distance *= 2) {
        if (t % (2 * distance) == 0) sums[t] += sums[t + distance];
        __syncthreads();
    }
    if (t == 0) partial[blockIdx.x] = sums[0];
}

// 2. The same additions by the first threads: whole warps work or rest. But their addresses lie 2, 4, 8 ... words
//    apart, which fall into the same banks of shared memory.
template <typename T>
__global__ void compacted(const T* x, std::size_t n, float* partial) {
    __shared__ float sums[kThreads];
    const unsigned t = threadIdx.x;
    sums[t] = load(x, std::size_t{blockIdx.x} * kThreads + t, n);
    __syncthreads();
    for (unsigned distance = 1; distance < kThreads; distance *= 2) {
        const unsigned i = 2 * distance * t;
        if (i < kThreads) sums[i] += sums[i + distance];
        __syncthreads();
    }
    if (t == 0) partial[blockIdx.x] = sums[0];
}

// 3. Add the upper half to the lower half: neighbors read neighbors, no bank is asked twice.
template <typename T>
__global__ void sequential(const T* x, std::size_t n, float* partial) {
    __shared__ float sums[kThreads];
    const unsigned t = threadIdx.x;
    sums[t] = load(x, std::size_t{blockIdx.x} * kThreads + t, n);
    __syncthreads();
    for (unsigned half = kThreads / 2; half > 0; half /= 2) {
        if (t < half) sums[t] += sums[t + half];
        __syncthreads();
    }
    if (t == 0) partial[blockIdx.x] = sums[0];
}

// 4. Half of the threads above only load: let every thread add two elements while it loads them.
template <typename T>
__global__ void added_on_load(const T* x, std::size_t n, float* partial) {
    __shared__ float sums[kThreads];
    const unsigned t = threadIdx.x;
    const std::size_t i = std::size_t{blockIdx.x} * (2 * kThreads) + t;
    sums[t] = load(x, i, n) + load(x, i + kThreads, n);
    __syncthreads();
    for (unsigned half = kThreads / 2; half > 0; half /= 2) {
        if (t < half) sums[t] += sums[t + half];
        __syncthreads();
    }
    if (t == 0) partial[blockIdx.x] = sums[0];
}

// The sum over a warp, in its lane 0: registers are exchanged, shared memory and barriers are not needed.
__device__ inline float sum_of_warp(float sum) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_down_sync(kAllLanes, sum, distance);
    return sum;
}

// The sum over a block of any whole number of warps, in its thread 0.
__device__ inline float sum_of_block(float sum) {
    __shared__ float of_warps[kWarp];
    const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    sum = sum_of_warp(sum);
    if (lane == 0) of_warps[warp] = sum;
    __syncthreads();
    if (warp == 0) sum = sum_of_warp(lane < blockDim.x / kWarp ? of_warps[lane] : 0.0f);
    return sum;
}

// 5. Warps add by shuffles: one barrier instead of eight.
template <typename T>
__global__ void shuffled(const T* x, std::size_t n, float* partial) {
    const std::size_t i = std::size_t{blockIdx.x} * (2 * kThreads) + threadIdx.x;
    const float sum = sum_of_block(load(x, i, n) + load(x, i + kThreads, n));
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// 6. As many blocks as the GPU runs at once, each strides over the vector: most additions are in registers.
template <typename T>
__global__ void strided(const T* x, std::size_t n, float* partial) {
    float sum = 0.0f;
    const std::size_t threads = std::size_t{gridDim.x} * kThreads;
    for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += threads) {
        sum += Element<T>::widen(x[i]);
    }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename T>
__device__ float sum_of_packet(const Packet<T>& packet) {
    float sum = 0.0f;
    for (int k = 0; k < Packet<T>::kElements; k++) sum += Element<T>::widen(packet.of[k]);
    return sum;
}

// 7. 16 bytes per load. 8. And kInFlight loads before the first addition, so that memory is never idle.
template <typename T, int kInFlight>
__global__ void vectorized(const T* x, std::size_t n, float* partial) {
    float sum = 0.0f;
    const std::size_t thread = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
    const std::size_t threads = std::size_t{gridDim.x} * kThreads;
    const std::size_t lead = before_packets(x, n), packets = (n - lead) / Packet<T>::kElements;
    const T* body = x + lead;
    constexpr int kElements = Packet<T>::kElements;
    std::size_t i = thread;
    for (; i + (kInFlight - 1) * threads < packets; i += kInFlight * threads) {
        Packet<T> loaded[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; k++) loaded[k] = load_packet(body + (i + k * threads) * kElements);
#pragma unroll
        for (int k = 0; k < kInFlight; k++) sum += sum_of_packet(loaded[k]);
    }
    for (; i < packets; i += threads) sum += sum_of_packet(load_packet(body + i * kElements));
    if (thread < lead) sum += Element<T>::widen(x[thread]);
    const std::size_t tail = lead + packets * kElements + thread;
    if (tail < n) sum += Element<T>::widen(x[tail]);
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The second pass, by one block of kLastThreads threads.
__global__ void second_pass(const float* partial, std::size_t n, float* out) {
    float sum = 0.0f;
    for (std::size_t i = threadIdx.x; i < n; i += kLastThreads) sum += partial[i];
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) *out = sum;
}

}  // namespace hpdl::cuda
