#include "memory.h"

#include <cstring>

#include "check.h"

namespace hpdl::cuda {

DeviceMemory::DeviceMemory(int device, std::size_t nbytes) : device_(device), nbytes_(nbytes) {
    const OnDevice current(device);
    check(cudaMalloc(&data_, nbytes), "cudaMalloc");
    const cudaError_t code = cudaMemset(data_, 0, nbytes);
    if (code != cudaSuccess) cudaFree(data_);
    check(code, "cudaMemset");
}

DeviceMemory::~DeviceMemory() {
    // A destructor cannot throw; where freeing fails the process has lost its GPU anyway.
    if (cudaSetDevice(device_) == cudaSuccess) cudaFree(data_);
}

std::string DeviceMemory::handle() const {
    const OnDevice current(device_);
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, data_), "cudaIpcGetMemHandle");
    return std::string(handle.reserved, sizeof handle.reserved);
}

PeerMemory::PeerMemory(int device, const std::string& handle) : device_(device) {
    const OnDevice current(device);
    cudaIpcMemHandle_t told;
    if (handle.size() != sizeof told.reserved) {
        throw std::invalid_argument("a CUDA IPC handle has " + std::to_string(sizeof told.reserved) + " bytes, not " +
                                    std::to_string(handle.size()));
    }
    std::memcpy(told.reserved, handle.data(), sizeof told.reserved);
    check(cudaIpcOpenMemHandle(&data_, told, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
}

PeerMemory::~PeerMemory() {
    if (cudaSetDevice(device_) == cudaSuccess) cudaIpcCloseMemHandle(data_);
}

}  // namespace hpdl::cuda
