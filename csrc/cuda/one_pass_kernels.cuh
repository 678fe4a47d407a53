// What runs on the GPU for one_pass.h.
#pragma once

#include "element.cuh"
#include "one_pass.h"

namespace hpdl::cuda {

constexpr int kOnePassThreads = 256;

template <typename T>
struct Tensors {
    T* of[kMaxTensors];
    int ranks;
};

template <typename T>
__device__ void add_element(const Tensors<T>& tensors, std::size_t i) {
    auto sum = Element<T>::widen(tensors.of[0][i]);
    for (int r = 1; r < tensors.ranks; r++) sum += Element<T>::widen(tensors.of[r][i]);
    for (int r = 0; r < tensors.ranks; r++) tensors.of[r][i] = Element<T>::round(sum);
}

template <typename T>
__device__ void add_packet(const Tensors<T>& tensors, std::size_t i) {
    using Sum = typename Element<T>::Sum;
    Sum sum[Packet<T>::kElements];
    Packet<T> packet = load_packet(tensors.of[0] + i);
    for (int k = 0; k < Packet<T>::kElements; k++) sum[k] = Element<T>::widen(packet.of[k]);
    for (int r = 1; r < tensors.ranks; r++) {
        packet = load_packet(tensors.of[r] + i);
        for (int k = 0; k < Packet<T>::kElements; k++) sum[k] += Element<T>::widen(packet.of[k]);
    }
    for (int k = 0; k < Packet<T>::kElements; k++) packet.of[k] = Element<T>::round(sum[k]);
    for (int r = 0; r < tensors.ranks; r++) store_packet(tensors.of[r] + i, packet);
}

// packets: of 16 bytes from element `lead` on, 0 if the tensors are not aligned alike; the rest goes element by
// element.
template <typename T>
__global__ void add_slices(Tensors<T> tensors, std::size_t lead, std::size_t packets, std::size_t count) {
    const std::size_t thread = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
    const std::size_t tail = lead + packets * Packet<T>::kElements;
    for (std::size_t i = thread; i < packets; i += threads) add_packet(tensors, lead + i * Packet<T>::kElements);
    for (std::size_t i = thread; i < lead; i += threads) add_element(tensors, i);
    for (std::size_t i = tail + thread; i < count; i += threads) add_element(tensors, i);
}

}  // namespace hpdl::cuda
