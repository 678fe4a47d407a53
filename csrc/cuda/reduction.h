// The sum of a vector on a GPU, as a ladder: each kernel changes one thing of the one before. All give the same sum up
// to rounding; none uses atomic additions, so that each gives the same bits in every run.
//
//     pass 1   block 0: x[0 .. m) -> partial[0]   block 1: x[m .. 2m) -> partial[1]   ...
//     pass 2   one block: partial[0 .. blocks) -> out[0]
//
// Elements are float, or 16-bit floats that widen to float when they are loaded. Sums are float.
// Ref: Harris 2007, "Optimizing Parallel Reduction in CUDA"; Luitjens 2014, "Faster Parallel Reductions on Kepler".
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "../buffer.h"

namespace hpdl::cuda {

struct Rung {
    const char* name;
    const char* change;  // from the rung below
};

// The ladder, from its lowest rung.
const std::vector<Rung>& rungs();

// Floats that `reduce` needs in `partial` for n elements on the current device.
std::size_t partials(int rung, std::size_t n);

// Launch both passes of a rung on `stream`. x: n elements of device memory; out: one float there.
// Throws: std::invalid_argument for an unknown rung or a dtype that is no float of 16 or 32 bits; CudaError.
void reduce(int rung, DType dtype, const void* x, std::size_t n, float* partial, float* out, cudaStream_t stream);

// Microseconds of each of `repeats` calls of `reduce`, by events on the stream. Waits for them: local work only.
std::vector<float> time_reduce(int rung, DType dtype, const void* x, std::size_t n, float* partial, float* out,
                               cudaStream_t stream, int repeats);

// Bytes per second that the memory of `device` can move at most, by its clock and the width of its bus.
double memory_bandwidth(int device);

}  // namespace hpdl::cuda
