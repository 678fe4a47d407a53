// CUDA calls that throw, the current device, and GPU memory that processes of one machine share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

namespace hpdl::cuda {

// A CUDA call that failed: the call and CUDA's own words.
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

// Memory is shared by CUDA IPC: one process allocates, the others open its handle.

// Zeroed memory of this process. torch's own allocator would not do: its blocks share allocations with other tensors.
class DeviceMemory {
  public:
    // Throws: CudaError, also if `device` has too little memory left.
    DeviceMemory(int device, std::size_t nbytes) : device_(device), nbytes_(nbytes) {
        const OnDevice current(device);
        check(cudaMalloc(&data_, nbytes), "cudaMalloc");
        const cudaError_t code = cudaMemset(data_, 0, nbytes);
        if (code != cudaSuccess) cudaFree(data_);
        check(code, "cudaMemset");
    }
    // A destructor cannot throw; if freeing fails the process has lost its GPU anyway.
    ~DeviceMemory() {
        if (cudaSetDevice(device_) == cudaSuccess) cudaFree(data_);
    }
    DeviceMemory(const DeviceMemory&) = delete;

    void* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

    // 64 bytes by which another process opens this memory.
    std::string handle() const {
        const OnDevice current(device_);
        cudaIpcMemHandle_t handle;
        check(cudaIpcGetMemHandle(&handle, data_), "cudaIpcGetMemHandle");
        return std::string(handle.reserved, sizeof handle.reserved);
    }

  private:
    int device_;
    std::size_t nbytes_;
    void* data_ = nullptr;
};

// The memory of another process, until this object ends. A process cannot open what is its own.
class PeerMemory {
  public:
    // device: of this process. Throws: CudaError if it cannot reach the memory, as on a GPU without peer access.
    PeerMemory(int device, const std::string& handle) : device_(device) {
        const OnDevice current(device);
        cudaIpcMemHandle_t peer;
        if (handle.size() != sizeof peer.reserved) {
            throw std::invalid_argument("a CUDA IPC handle has " + std::to_string(sizeof peer.reserved) +
                                        " bytes, not " + std::to_string(handle.size()));
        }
        std::memcpy(peer.reserved, handle.data(), sizeof peer.reserved);
        check(cudaIpcOpenMemHandle(&data_, peer, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    }
    ~PeerMemory() {
        if (cudaSetDevice(device_) == cudaSuccess) cudaIpcCloseMemHandle(data_);
    }
    PeerMemory(const PeerMemory&) = delete;

    void* data() const { return data_; }

  private:
    int device_;
    void* data_ = nullptr;
};

}  // namespace hpdl::cuda
