// Element types, memory of them, and what a rank is about to do with it: shared by every algorithm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace hpdl {

// In the order of hpdl_lab.comm.buffers.DTYPES, which is part of the wire format.
enum class DType : unsigned char {
    float32,
    float64,
    bfloat16,
    float16,
    int32,
    int64,
    uint8,
    boolean,
    int8,
    int16,
    uint16,
    complex64,
    complex128,
    float8_e4m3fn,
    float8_e5m2
};

// A row of hpdl_lab.comm.buffers.TABLE; tests compare the two.
struct DTypeInfo {
    const char* name;
    std::size_t nbytes, alignment;
    const char* instead_of_sum;  // null if sums know it
};

constexpr const char* kAddFloat8 = "gather it and add in float32, comm.all_gather(x).float().sum(0)";
constexpr DTypeInfo kDTypeInfo[] = {
    {"float32", 4, 4, nullptr},
    {"float64", 8, 8, nullptr},
    {"bfloat16", 2, 2, nullptr},
    {"float16", 2, 2, nullptr},
    {"int32", 4, 4, nullptr},
    {"int64", 8, 8, nullptr},
    {"uint8", 1, 1, nullptr},
    {"bool", 1, 1, "gather it as uint8 and take the maximum, comm.all_gather(x.to(torch.uint8)).amax(0)"},
    {"int8", 1, 1, nullptr},
    {"int16", 2, 2, nullptr},
    {"uint16", 2, 2, "add it as int32, comm.all_reduce(x.to(torch.int32))"},
    {"complex64", 8, 4, nullptr},
    {"complex128", 16, 8, nullptr},
    {"float8_e4m3fn", 1, 1, kAddFloat8},
    {"float8_e5m2", 1, 1, kAddFloat8},
};
constexpr int kDTypes = sizeof kDTypeInfo / sizeof *kDTypeInfo;
static_assert(kDTypes <= 16, "a message's tag has 4 bits for it");

constexpr const DTypeInfo& info_of(DType dtype) { return kDTypeInfo[static_cast<int>(dtype)]; }
constexpr const char* name_of(DType dtype) { return info_of(dtype).name; }
constexpr std::size_t item_size(DType dtype) { return info_of(dtype).nbytes; }

// Contiguous memory that the caller keeps alive.
struct Buffer {
    char* data;
    std::size_t count;
    DType dtype;

    std::size_t nbytes() const { return count * item_size(dtype); }

    // Elements [begin, begin + count) of it.
    Buffer part(std::size_t begin, std::size_t count) const { return {data + begin * item_size(dtype), count, dtype}; }
};

// What one rank is about to do. Plain bytes: it travels through MPI and lies in shared memory.
struct Call {
    char name[16];  // "all_reduce"
    std::int64_t count;
    std::int32_t root;  // -1 if there is none
    DType dtype;
    char zero[3];  // no padding: calls are compared byte by byte

    static Call of(const char* name, std::size_t count, DType dtype, int root = -1);
    bool operator==(const Call& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
    std::string text() const;
};

// 1001, float32 -> "1,001 float32"
std::string describe(std::size_t count, DType dtype);

// Throw std::invalid_argument with the numbers; verb: "all_reduce", for the text.

// All calls are equal.
void require_consensus(const std::vector<Call>& calls);

void require_root(int root, int size);

// Sums know its dtype, and read whole numbers: its memory begins at a multiple of their size.
void require_addable(const Buffer& buffer, const char* verb);

// Two memories are one and the same, or have nothing in common.
void require_apart(const Buffer& a, const Buffer& b, const char* verb);

// `whole` has `rows` rows like `part`, of the same dtype; they have nothing in common, or `part` is row `own`, -1:
// none. adds: they can be added, too.
void require_rows(const Buffer& whole, const Buffer& part, int rows, int own, bool adds, const char* verb);

}  // namespace hpdl
