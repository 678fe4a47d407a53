#include "check.h"
#include "element.cuh"
#include "one_pass.h"

namespace hpdl::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;  // enough to fill it: 2,048 threads

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

// packets: of 16 bytes from element `lead` on, 0 where the tensors do not lie alike; the rest goes element by element.
template <typename T>
__global__ void add_slices(Tensors<T> tensors, std::size_t lead, std::size_t packets, std::size_t count) {
    const std::size_t thread = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
    const std::size_t tail = lead + packets * Packet<T>::kElements;
    for (std::size_t i = thread; i < packets; i += threads) add_packet(tensors, lead + i * Packet<T>::kElements);
    for (std::size_t i = thread; i < lead; i += threads) add_element(tensors, i);
    for (std::size_t i = tail + thread; i < count; i += threads) add_element(tensors, i);
}

template <typename T>
void launch(void* const* addresses, int ranks, std::size_t first, std::size_t count, cudaStream_t stream) {
    Tensors<T> tensors{};
    tensors.ranks = ranks;
    for (int r = 0; r < ranks; r++) tensors.of[r] = static_cast<T*>(addresses[r]) + first;
    std::size_t lead = before_packets(tensors.of[0], count);
    for (int r = 1; r < ranks; r++) {
        if (before_packets(tensors.of[r], count) != lead) lead = count;
    }
    const std::size_t packets = (count - lead) / Packet<T>::kElements;
    int device = 0, processors = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    const std::size_t work = packets > count - packets * Packet<T>::kElements ? packets : count;
    const std::size_t wanted = (work + kThreads - 1) / kThreads, most = std::size_t(processors) * kBlocksPerProcessor;
    const unsigned blocks = static_cast<unsigned>(wanted < most ? wanted : most);
    add_slices<T><<<blocks, kThreads, 0, stream>>>(tensors, lead, packets, count);
    check(cudaGetLastError(), "add_slices");
}

}  // namespace

void one_pass(void* const* tensors, int ranks, std::size_t first, std::size_t count, DType dtype, cudaStream_t stream) {
    if (ranks < 1 || ranks > kMaxTensors) {
        throw std::invalid_argument("one_pass adds 1 to " + std::to_string(kMaxTensors) + " tensors, not " +
                                    std::to_string(ranks));
    }
    if (count == 0) return;
    switch (dtype) {
        case DType::float32: return launch<float>(tensors, ranks, first, count, stream);
        case DType::float64: return launch<double>(tensors, ranks, first, count, stream);
        case DType::bfloat16: return launch<__nv_bfloat16>(tensors, ranks, first, count, stream);
        case DType::float16: return launch<__half>(tensors, ranks, first, count, stream);
        case DType::int32: return launch<int>(tensors, ranks, first, count, stream);
        case DType::int64: return launch<long long>(tensors, ranks, first, count, stream);
        case DType::uint8: return launch<unsigned char>(tensors, ranks, first, count, stream);
    }
    throw std::invalid_argument("one_pass does not know dtype " + std::to_string(static_cast<int>(dtype)));
}

}  // namespace hpdl::cuda
