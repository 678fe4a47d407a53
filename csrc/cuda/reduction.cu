#include "reduction.h"

#include <stdexcept>
#include <string>

#include "device.h"
#include "reduction_kernels.cuh"

namespace hpdl::cuda {

namespace {

constexpr int kBlocksPerProcessor = 8;  // of kThreads threads: as many as a multiprocessor holds

// How many elements a block takes; 0 if the number of blocks is that of the GPU, whatever n.
constexpr std::size_t kPerBlock[] = {kThreads, kThreads, kThreads, 2 * kThreads, 2 * kThreads, 0, 0, 0};

void require(int rung) {
    if (rung < 0 || rung >= static_cast<int>(rungs().size())) {
        throw std::invalid_argument("the ladder has the rungs 0 to " + std::to_string(rungs().size() - 1) + ", not " +
                                    std::to_string(rung));
    }
}

template <typename T>
void first_pass(int rung, const void* data, std::size_t n, float* partial, unsigned blocks, cudaStream_t stream) {
    const T* x = static_cast<const T*>(data);
    switch (rung) {
        case 0: interleaved<T><<<blocks, kThreads, 0, stream>>>(x, n, partial); break;
        case 1: compacted<T><<<blocks, kThreads, 0, stream>>>(x, n, partial); break;
        case 2: sequential<T><<<blocks, kThreads, 0, stream>>>(x, n, partial); break;
        case 3: added_on_load<T><<<blocks, kThreads, 0, stream>>>(x, n, partial); break;
        case 4: shuffled<T><<<blocks, kThreads, 0, stream>>>(x, n, partial); break;
        case 5: strided<T><<<blocks, kThreads, 0, stream>>>(x, n, partial); break;
        case 6: vectorized<T, 1><<<blocks, kThreads, 0, stream>>>(x, n, partial); break;
        case 7: vectorized<T, 4><<<blocks, kThreads, 0, stream>>>(x, n, partial); break;
    }
}

// A CUDA event that is destroyed also if an exception passes.
struct Event {
    cudaEvent_t handle = nullptr;
    Event() { check(cudaEventCreate(&handle), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(handle); }
    Event(const Event&) = delete;
};

}  // namespace

const std::vector<Rung>& rungs() {
    static const std::vector<Rung> ladder = {
        {"interleaved", "neighbors add; working threads stand among idle ones"},
        {"compacted", "the first threads work; their addresses share banks"},
        {"sequential", "the upper half adds to the lower; no bank conflicts"},
        {"added on load", "every thread adds two elements while loading"},
        {"shuffled", "warps add in registers; one barrier instead of eight"},
        {"strided", "blocks that fill the GPU stride over the vector"},
        {"vectorized", "16 bytes per load"},
        {"in flight", "four loads before the first addition"},
    };
    return ladder;
}

std::size_t partials(int rung, std::size_t n) {
    require(rung);
    if (kPerBlock[rung]) return n ? (n + kPerBlock[rung] - 1) / kPerBlock[rung] : 1;
    int device = 0, processors = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return static_cast<std::size_t>(processors) * kBlocksPerProcessor;
}

void reduce(int rung, DType dtype, const void* x, std::size_t n, float* partial, float* out, cudaStream_t stream) {
    const std::size_t blocks = partials(rung, n);
    if (blocks > 0x7fffffffu) {
        throw std::invalid_argument(std::to_string(n) + " elements need more blocks than a grid has on rung " +
                                    std::to_string(rung));
    }
    const auto grid = static_cast<unsigned>(blocks);
    switch (dtype) {
        case DType::float32: first_pass<float>(rung, x, n, partial, grid, stream); break;
        case DType::float16: first_pass<__half>(rung, x, n, partial, grid, stream); break;
        case DType::bfloat16: first_pass<__nv_bfloat16>(rung, x, n, partial, grid, stream); break;
        default:
            throw std::invalid_argument(std::string("the ladder adds float32, float16 and bfloat16, not ") +
                                        name_of(dtype));
    }
    check(cudaGetLastError(), rungs()[rung].name);
    second_pass<<<1, kLastThreads, 0, stream>>>(partial, blocks, out);
    check(cudaGetLastError(), "second pass");
}

std::vector<float> time_reduce(int rung, DType dtype, const void* x, std::size_t n, float* partial, float* out,
                               cudaStream_t stream, int repeats) {
    std::vector<Event> events(repeats > 0 ? repeats + 1 : 0);
    std::vector<float> times_us;
    if (events.empty()) return times_us;
    check(cudaEventRecord(events[0].handle, stream), "cudaEventRecord");
    for (int i = 0; i < repeats; i++) {
        reduce(rung, dtype, x, n, partial, out, stream);
        check(cudaEventRecord(events[i + 1].handle, stream), "cudaEventRecord");
    }
    check(cudaEventSynchronize(events[repeats].handle), "cudaEventSynchronize");
    for (int i = 0; i < repeats; i++) {
        float ms = 0.0f;
        check(cudaEventElapsedTime(&ms, events[i].handle, events[i + 1].handle), "cudaEventElapsedTime");
        times_us.push_back(ms * 1e3f);
    }
    return times_us;
}

double memory_bandwidth(int device) {
    int clock_khz = 0, bus_bits = 0;
    check(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrMemoryClockRate, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, device), "cudaDeviceGetAttribute");
    return 2.0 * clock_khz * 1e3 * bus_bits / 8;  // two transfers per clock
}

}  // namespace hpdl::cuda
