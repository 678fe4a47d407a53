#include "dtype.h"

#include <cstdint>
#include <stdexcept>

namespace hpdl {

DType dtype_at(int index) {
    if (index < 0 || index >= kDTypes)
        throw std::invalid_argument("dtype " + std::to_string(index) + " is none of 0 to " +
                                    std::to_string(kDTypes - 1));
    return static_cast<DType>(index);
}

std::string describe(std::size_t count, DType dtype) {
    std::string digits = std::to_string(count);
    for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(at, ",");
    return digits + " " + name_of(dtype);
}

void require_aligned(const Buffer& buffer, const char* verb) {
    const std::size_t beyond = reinterpret_cast<std::uintptr_t>(buffer.data) % item_size(buffer.dtype);
    if (buffer.count == 0 || beyond == 0) return;
    throw std::invalid_argument(std::string("cannot ") + verb + " " + describe(buffer.count, buffer.dtype) +
                                " at an address that is " + std::to_string(beyond) + " bytes beyond a multiple of " +
                                std::to_string(item_size(buffer.dtype)) + ": use a copy");
}

void require_apart(const Buffer& a, const Buffer& b, const char* verb) {
    const auto at = reinterpret_cast<std::uintptr_t>(a.data), bt = reinterpret_cast<std::uintptr_t>(b.data);
    const bool same = at == bt && a.nbytes() == b.nbytes();
    if (same || a.count == 0 || b.count == 0 || at + a.nbytes() <= bt || bt + b.nbytes() <= at) return;
    throw std::invalid_argument(std::string("cannot ") + verb + " memory that overlaps: " + describe(a.count, a.dtype) +
                                " and " + describe(b.count, b.dtype) + " begin " +
                                std::to_string(at < bt ? bt - at : at - bt) + " bytes apart");
}

void require_rows(const Buffer& whole, const Buffer& part, int parts, const char* verb) {
    if (whole.dtype == part.dtype && whole.count == part.count * parts) return;
    throw std::invalid_argument(std::string(verb) + " of " + std::to_string(parts) + " ranks needs " +
                                std::to_string(parts) + " rows of " + describe(part.count, part.dtype) + ", got " +
                                describe(whole.count, whole.dtype));
}

}  // namespace hpdl
