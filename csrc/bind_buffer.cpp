#include "bind.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "dlpack.h"

namespace nb = nanobind;

namespace hpdl {

namespace {

// The exchange functions of the type of `x`, remembered for the type asked last: it is nearly always torch.Tensor.
const dlpack::Exchange* exchange_of(nb::handle x) {
    static PyTypeObject* last_type = nullptr;
    static const dlpack::Exchange* last_exchange = nullptr;
    PyTypeObject* type = Py_TYPE(x.ptr());
    if (type == last_type) return last_exchange;
    PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear();
        return nullptr;  // not remembered: a NumPy array between two tensors costs the tensors nothing
    }
    const auto* exchange = static_cast<dlpack::Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (!exchange) PyErr_Clear();
    if (exchange && (exchange->major != 1 || !exchange->describe)) exchange = nullptr;
    Py_INCREF(type);  // for ever: its address must not be given to another type
    last_type = type;
    last_exchange = exchange;
    return exchange;
}

std::optional<DType> dtype_of(std::uint8_t code, int bits) {
    switch (code << 8 | bits) {
        case dlpack::kFloat << 8 | 32: return DType::float32;
        case dlpack::kFloat << 8 | 64: return DType::float64;
        case dlpack::kBFloat << 8 | 16: return DType::bfloat16;
        case dlpack::kFloat << 8 | 16: return DType::float16;
        case dlpack::kInt << 8 | 32: return DType::int32;
        case dlpack::kInt << 8 | 64: return DType::int64;
        case dlpack::kUInt << 8 | 8: return DType::uint8;
    }
    return std::nullopt;
}

std::optional<Buffer> from_tensor(nb::handle x) {
    const dlpack::Exchange* exchange = exchange_of(x);
    if (!exchange) return std::nullopt;
    dlpack::Tensor tensor;
    if (exchange->describe(x.ptr(), &tensor) != 0) {
        PyErr_Clear();
        return std::nullopt;
    }
    const std::optional<DType> dtype = dtype_of(tensor.code, tensor.bits);
    if (tensor.device_type != dlpack::kCpu || tensor.lanes != 1 || !dtype) return std::nullopt;
    std::int64_t count = 1;
    bool contiguous = true;
    for (int i = tensor.ndim - 1; i >= 0; i--) {
        contiguous = contiguous && (!tensor.strides || tensor.shape[i] == 1 || tensor.strides[i] == count);
        count *= tensor.shape[i];
    }
    if (!contiguous && count != 0) return std::nullopt;
    // One element may be a view that negates it, which only Python tells; more of them would not be contiguous.
    if (count == 1 && (tensor.ndim == 0 || (tensor.strides && tensor.strides[tensor.ndim - 1] != 1)))
        return std::nullopt;
    return Buffer{static_cast<char*>(tensor.data) + tensor.byte_offset, static_cast<std::size_t>(count), *dtype};
}

std::optional<DType> dtype_of_format(const char* format) {
    if (!format || std::strlen(format) != 1) return std::nullopt;
    switch (*format) {
        case 'f': return DType::float32;
        case 'd': return DType::float64;
        case 'e': return DType::float16;
        case 'i': return DType::int32;
        case 'l':
        case 'q': return DType::int64;
        case 'B': return DType::uint8;
    }
    return std::nullopt;
}

// Other objects with memory may be resized while they are under way: a bytearray.
bool is_array(nb::handle x) {
    static PyObject* ndarray = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
    return PyObject_TypeCheck(x.ptr(), reinterpret_cast<PyTypeObject*>(ndarray));
}

std::optional<Buffer> from_array(nb::handle x, bool writable) {
    Py_buffer view;
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(x.ptr(), &view, flags) != 0) {
        PyErr_Clear();
        return std::nullopt;
    }
    const std::optional<DType> dtype = dtype_of_format(view.format);
    const auto [memory, nbytes, itemsize] = std::tuple(view.buf, view.len, view.itemsize);
    PyBuffer_Release(&view);  // the memory stays: the caller holds `x`
    // An item may have no bytes at all, as of dtype "S0".
    if (!dtype || static_cast<Py_ssize_t>(item_size(*dtype)) != itemsize) return std::nullopt;
    return Buffer{static_cast<char*>(memory), static_cast<std::size_t>(nbytes / itemsize), *dtype};
}

Buffer from_python(nb::handle x, const char* verb, bool writable) {
    nb::object described = nb::module_::import_("hpdl_lab.comm.buffers").attr("buffer_of")(x, verb);
    if (writable && is_array(x) && !nb::cast<bool>(x.attr("flags").attr("writeable")))
        throw std::invalid_argument(std::string("cannot ") + verb + " a read-only array");
    const std::string name = nb::cast<std::string>(described.attr("dtype"));
    for (int i = 0; i < kDTypes; i++) {
        if (name != kDTypeNames[i]) continue;
        return {reinterpret_cast<char*>(nb::cast<std::uintptr_t>(described.attr("address"))),
                nb::cast<std::size_t>(described.attr("count")), static_cast<DType>(i)};
    }
    throw std::invalid_argument("dtype " + name + " is unknown");
}

}  // namespace

Buffer buffer_of(nb::handle x, const char* verb, bool writable) {
    if (std::optional<Buffer> buffer = from_tensor(x)) return *buffer;
    if (is_array(x)) {
        if (std::optional<Buffer> buffer = from_array(x, writable)) return *buffer;
    }
    return from_python(x, verb, writable);
}

}  // namespace hpdl
