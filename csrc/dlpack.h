// The part of the DLPack C exchange interface (version 1) by which torch describes a tensor without a Python call:
// type(x).__dlpack_c_exchange_api__ is a capsule that holds a pointer to Exchange. Ref: dmlc/dlpack, dlpack.h.
#pragma once

#include <cstdint>

namespace hpdl::dlpack {

constexpr std::int32_t kCpu = 1;
enum Code : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4 };

struct Tensor {
    void* data;
    std::int32_t device_type, device_id;
    std::int32_t ndim;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t* shape;
    std::int64_t* strides;  // may be null: contiguous
    std::uint64_t byte_offset;
};

struct Exchange {
    std::uint32_t major, minor;
    Exchange* previous;
    void* unused[3];
    int (*describe)(void* object, Tensor* out);  // may be null; the tensor's memory stays its owner's
    void* work_stream;
};

}  // namespace hpdl::dlpack
