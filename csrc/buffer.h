// Element types, memory of them, and what a rank is about to do with it: shared by every algorithm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace hpdl {

// In the order of hpdl_lab.comm.buffers.DTYPES, which is part of the wire format.
enum class DType : unsigned char { float32, float64, bfloat16, float16, int32, int64, uint8 };
constexpr int kDTypes = 7;
constexpr const char* kDTypeNames[kDTypes] = {"float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8"};
constexpr std::size_t kItemSizes[kDTypes] = {4, 8, 2, 2, 4, 8, 1};

constexpr const char* name_of(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }
constexpr std::size_t item_size(DType dtype) { return kItemSizes[static_cast<int>(dtype)]; }

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

// Sums read whole elements: their memory begins at a multiple of the element's size.
void require_aligned(const Buffer& buffer, const char* verb);

// Two memories are one and the same, or have nothing in common.
void require_apart(const Buffer& a, const Buffer& b, const char* verb);

// `whole` has `rows` rows like `part`, of the same dtype; they have nothing in common, or `part` is row `own`, -1:
// none. adds: they are aligned, too.
void require_rows(const Buffer& whole, const Buffer& part, int rows, int own, bool adds, const char* verb);

}  // namespace hpdl
