#include "dtype.h"

namespace hpdl {

std::string describe(std::size_t count, DType dtype) {
    std::string digits = std::to_string(count);
    for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(at, ",");
    return digits + " " + name_of(dtype);
}

}  // namespace hpdl
