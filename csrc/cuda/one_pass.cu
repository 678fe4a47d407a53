#include "device.h"
#include "one_pass.h"
#include "one_pass_kernels.cuh"

namespace hpdl::cuda {

namespace {

constexpr int kBlocksPerProcessor = 8;  // enough to fill it: 2,048 threads

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
    const std::size_t wanted = (work + kOnePassThreads - 1) / kOnePassThreads,
                      most = std::size_t(processors) * kBlocksPerProcessor;
    const unsigned blocks = static_cast<unsigned>(wanted < most ? wanted : most);
    add_slices<T><<<blocks, kOnePassThreads, 0, stream>>>(tensors, lead, packets, count);
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
        case DType::int16: return launch<short>(tensors, ranks, first, count, stream);
        case DType::uint8:
        case DType::int8: return launch<unsigned char>(tensors, ranks, first, count, stream);
        case DType::complex64: return launch<float>(tensors, ranks, 2 * first, 2 * count, stream);
        case DType::complex128: return launch<double>(tensors, ranks, 2 * first, 2 * count, stream);
        default: break;  // sums do not know it
    }
    throw std::invalid_argument("one_pass does not know dtype " + std::to_string(static_cast<int>(dtype)));
}

}  // namespace hpdl::cuda
