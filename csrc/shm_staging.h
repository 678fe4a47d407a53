// How a tensor that is not in shared memory is cut for its journey through it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace hpdl {

// Bytes of a chunk: small enough that what one rank has copied in is still in the cache when the others read it, large
// enough that meetings cost little. 32 KiB to 1 MiB were tried.
constexpr std::size_t kChunk = std::size_t{1} << 18;
constexpr std::size_t kLine = 64;  // bytes of a cache line, which two ranks should not write at once

// Nothing is copied from or to a tensor without elements, which may have no address.
inline void copy(char* to, const char* from, std::size_t nbytes) {
    if (nbytes > 0) std::memcpy(to, from, nbytes);
}

// Elements [begin, end) of something.
struct Range {
    std::size_t begin, end;
    std::size_t count() const { return end - begin; }
};

// Part i of `count` elements in `parts` parts of whole cache lines, the last ones shorter or empty.
inline Range part_of(std::size_t count, int parts, int i, std::size_t item_size) {
    const std::size_t line = kLine / item_size;
    const std::size_t each = ((count + parts - 1) / parts + line - 1) / line * line;
    return {std::min(count, each * i), std::min(count, each * (i + 1))};
}

// Chunk i of `count` elements in chunks of `each`.
inline Range chunk_of(std::size_t count, std::size_t each, int i) {
    return {std::min(count, each * i), std::min(count, each * (i + 1))};
}

// Number of chunks of `each` elements, at least one: an empty tensor has a meeting, too.
inline int chunks_in(std::size_t count, std::size_t each) {
    return static_cast<int>(std::max<std::size_t>(1, (count + each - 1) / each));
}

}  // namespace hpdl
