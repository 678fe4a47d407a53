// A CUDA call that failed becomes an exception with the call and CUDA's own words.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace hpdl::cuda {

struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Throw CudaError unless `code`, which `call` returned, is cudaSuccess.
inline void check(cudaError_t code, const char* call) {
    if (code == cudaSuccess) return;
    throw CudaError(std::string(call) + " failed: " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code));
}

// Make `device` the current one for as long as this lives: torch has a current device too, which must not change.
class OnDevice {
  public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        if (device != before_) check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~OnDevice() { cudaSetDevice(before_); }
    OnDevice(const OnDevice&) = delete;

  private:
    int before_ = 0;
};

}  // namespace hpdl::cuda
