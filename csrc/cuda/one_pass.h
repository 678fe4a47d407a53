// The sum over ranks in one pass over memory that all of them can reach: every rank takes one slice, loads it from all
// ranks, adds in the order of ranks, and stores the sum to all.
//
//     rank 0   [ slice 0 | slice 1 | slice 2 ]       rank 1 runs the kernel on slice 1 of all three tensors:
//     rank 1   [ slice 0 | slice 1 | slice 2 ]       3 loads, 2 additions, 3 stores per element
//     rank 2   [ slice 0 | slice 1 | slice 2 ]
//
// Every input is read once and every output written once, which is the bound. The kernel waits for nobody: ranks that
// share a GPU take turns on it, and a kernel that spun until another rank's had run would keep that one from running.
// The ranks meet on the host before it and after it (hpdl_lab/comm/device/memory.py).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../buffer.h"

namespace hpdl::cuda {

constexpr int kMaxTensors = 16;  // the addresses travel as arguments of the kernel

// Launch it on `stream`: elements [first, first + count) of each of `tensors` become their sum.
// tensors: addresses of `ranks` tensors of one dtype, in the order of ranks, which the current device can reach.
// Throws: std::invalid_argument for fewer than 1 or more than kMaxTensors; CudaError.
void one_pass(void* const* tensors, int ranks, std::size_t first, std::size_t count, DType dtype, cudaStream_t stream);

}  // namespace hpdl::cuda
