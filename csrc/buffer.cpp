#include "buffer.h"

#include <algorithm>
#include <stdexcept>

namespace hpdl {

std::string describe(std::size_t count, DType dtype) {
    std::string digits = std::to_string(count);
    for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(at, ",");
    return digits + " " + name_of(dtype);
}

Call Call::of(const char* name, std::size_t count, DType dtype, int root) {
    Call call{};
    std::strncpy(call.name, name, sizeof call.name - 1);
    call.count = static_cast<std::int64_t>(count);
    call.root = root;
    call.dtype = dtype;
    return call;
}

std::string Call::text() const {
    std::string text = name;
    if (count > 0) text += " of " + describe(static_cast<std::size_t>(count), dtype);
    const bool gathers = !std::strcmp(name, "gather") || !std::strcmp(name, "reduce");
    if (root >= 0) text += (gathers ? " to rank " : " from rank ") + std::to_string(root);
    return text;
}

void require_consensus(const std::vector<Call>& calls) {
    if (std::all_of(calls.begin(), calls.end(), [&](const Call& call) { return call == calls[0]; })) return;
    std::string text = "the ranks disagree: ";
    for (std::size_t first = 0; first < calls.size();) {
        std::size_t last = first;
        while (last + 1 < calls.size() && calls[last + 1] == calls[first]) last++;
        text += first ? "; rank" : "rank";
        text += first == last ? " " + std::to_string(first) + " calls "
                              : "s " + std::to_string(first) + "-" + std::to_string(last) + " call ";
        text += calls[first].text();
        first = last + 1;
    }
    throw std::invalid_argument(text);
}

void require_root(int root, int size) {
    if (root < 0 || root >= size)
        throw std::invalid_argument("no root " + std::to_string(root) + " among " + std::to_string(size));
}

void require_addable(const Buffer& buffer, const char* verb) {
    const DTypeInfo& dtype = info_of(buffer.dtype);
    if (dtype.instead_of_sum)
        throw std::invalid_argument(std::string("cannot ") + verb + " " + dtype.name +
                                    ", which has no sum: " + dtype.instead_of_sum);
    const std::size_t beyond = reinterpret_cast<std::uintptr_t>(buffer.data) % dtype.alignment;
    if (buffer.count == 0 || beyond == 0) return;
    throw std::invalid_argument(std::string("cannot ") + verb + " " + describe(buffer.count, buffer.dtype) +
                                " at an address that is " + std::to_string(beyond) + " bytes beyond a multiple of " +
                                std::to_string(dtype.alignment) + ": use a copy");
}

void require_apart(const Buffer& a, const Buffer& b, const char* verb) {
    const auto at = reinterpret_cast<std::uintptr_t>(a.data), bt = reinterpret_cast<std::uintptr_t>(b.data);
    const bool same = at == bt && a.nbytes() == b.nbytes();
    if (same || a.count == 0 || b.count == 0 || at + a.nbytes() <= bt || bt + b.nbytes() <= at) return;
    throw std::invalid_argument(std::string("cannot ") + verb + " memory that overlaps: " + describe(a.count, a.dtype) +
                                " and " + describe(b.count, b.dtype) + " begin " +
                                std::to_string(at < bt ? bt - at : at - bt) + " bytes apart");
}

void require_rows(const Buffer& whole, const Buffer& part, int rows, int own, bool adds, const char* verb) {
    if (whole.dtype != part.dtype || whole.count != part.count * rows)
        throw std::invalid_argument(std::string(verb) + " of " + std::to_string(rows) + " ranks needs " +
                                    std::to_string(rows) + " rows of " + describe(part.count, part.dtype) + ", got " +
                                    describe(whole.count, whole.dtype));
    if (adds) require_addable(whole, verb);
    if (adds) require_addable(part, verb);
    if (own < 0 || part.data != whole.data + own * part.nbytes()) require_apart(whole, part, verb);
}

}  // namespace hpdl
