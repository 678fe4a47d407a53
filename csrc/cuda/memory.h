// GPU memory that processes of one machine share, by CUDA IPC: one allocates, the others open its handle.
#pragma once

#include <cstddef>
#include <string>

namespace hpdl::cuda {

// Zeroed memory of this process. torch's own allocator would not do: its blocks share allocations with other tensors.
class DeviceMemory {
  public:
    // Throws: CudaError, also where `device` has too little memory left.
    DeviceMemory(int device, std::size_t nbytes);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;

    void* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

    // 64 bytes by which another process opens this memory.
    std::string handle() const;

  private:
    int device_;
    std::size_t nbytes_;
    void* data_ = nullptr;
};

// The memory of another process, until this object ends. A process cannot open what is its own.
class PeerMemory {
  public:
    // device: of this process. Throws: CudaError where it cannot reach the memory, as on a GPU without peer access.
    PeerMemory(int device, const std::string& handle);
    ~PeerMemory();
    PeerMemory(const PeerMemory&) = delete;

    void* data() const { return data_; }

  private:
    int device_;
    void* data_ = nullptr;
};

}  // namespace hpdl::cuda
