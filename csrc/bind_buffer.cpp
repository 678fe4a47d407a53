#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>

#include "bind.h"

namespace nb = nanobind;

namespace hpdl {

namespace {

// The DLPack C exchange interface, version 1, by which torch describes a tensor without a Python call:
// type(x).__dlpack_c_exchange_api__ is a capsule with a pointer to this. Ref: dmlc/dlpack, dlpack.h.
//
// nb::ndarray<> asks x.__dlpack__() instead, which takes 1,900 ns of a torch tensor where this takes 45 ns: the whole
// of a 4-byte all-reduce of two ranks in shared memory takes 260 ns. Of a NumPy array nb::ndarray<> takes 70 ns.
struct Exchange {
    std::uint32_t major, minor;
    Exchange* previous;
    void* unused[3];
    int (*describe)(void* object, nb::dlpack::dltensor* out);  // may be null; the tensor's memory stays its owner's
    void* work_stream;
};

// Other objects with memory may be resized meanwhile: a bytearray.
bool is_array(nb::handle x) {
    static PyObject* ndarray = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
    return PyObject_TypeCheck(x.ptr(), reinterpret_cast<PyTypeObject*>(ndarray));
}

// The exchange functions of the type of `x`, remembered for the type asked last: it is nearly always torch.Tensor.
const Exchange* exchange_of(nb::handle x) {
    static PyTypeObject* last_type = nullptr;
    static const Exchange* last_exchange = nullptr;
    PyTypeObject* type = Py_TYPE(x.ptr());
    if (type == last_type) return last_exchange;
    if (is_array(x)) return nullptr;  // not remembered: a NumPy array between two tensors costs the tensors nothing
    PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear();
        return nullptr;
    }
    const auto* exchange = static_cast<Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (!exchange) PyErr_Clear();
    if (exchange && (exchange->major != 1 || !exchange->describe)) exchange = nullptr;
    Py_INCREF(type);  // for ever: its address must not be given to another type
    last_type = type;
    last_exchange = exchange;
    return exchange;
}

constexpr std::uint8_t kFloat8E4m3fn = 10, kFloat8E5m2 = 12;  // DLPack's codes, which nanobind may not name

std::optional<DType> dtype_of(const nb::dlpack::dtype& dtype) {
    if (dtype == nb::dtype<float>()) return DType::float32;
    if (dtype == nb::dtype<double>()) return DType::float64;
    if (dtype == nb::dtype<std::int32_t>()) return DType::int32;
    if (dtype == nb::dtype<std::int64_t>()) return DType::int64;
    if (dtype == nb::dtype<std::uint8_t>()) return DType::uint8;
    if (dtype == nb::dtype<bool>()) return DType::boolean;
    if (dtype == nb::dtype<std::int8_t>()) return DType::int8;
    if (dtype == nb::dtype<std::int16_t>()) return DType::int16;
    if (dtype == nb::dtype<std::uint16_t>()) return DType::uint16;
    if (dtype.lanes != 1) return std::nullopt;
    if (dtype.code == kFloat8E4m3fn) return DType::float8_e4m3fn;
    if (dtype.code == kFloat8E5m2) return DType::float8_e5m2;
    if (dtype.bits != 16) return std::nullopt;
    if (dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat)) return DType::bfloat16;
    if (dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float)) return DType::float16;
    return std::nullopt;  // of complex numbers Python knows whether the memory holds them or their conjugates
}

std::optional<Buffer> from_tensor(nb::handle x) {
    const Exchange* exchange = exchange_of(x);
    if (!exchange) return std::nullopt;
    nb::dlpack::dltensor tensor;
    if (exchange->describe(x.ptr(), &tensor) != 0) {
        PyErr_Clear();
        return std::nullopt;
    }
    const std::optional<DType> dtype = dtype_of(tensor.dtype);
    if (tensor.device.device_type != nb::device::cpu::value || !dtype) return std::nullopt;
    std::int64_t count = 1;
    bool contiguous = true;
    for (int i = tensor.ndim - 1; i >= 0; i--) {
        contiguous = contiguous && (!tensor.strides || tensor.shape[i] == 1 || tensor.strides[i] == count);
        count *= tensor.shape[i];
    }
    if (!contiguous && count != 0) return std::nullopt;
    // One element may be a view that negates it, which only Python knows; more of them would not be contiguous.
    if (count == 1 && (tensor.ndim == 0 || (tensor.strides && tensor.strides[tensor.ndim - 1] != 1)))
        return std::nullopt;
    return Buffer{static_cast<char*>(tensor.data) + tensor.byte_offset, static_cast<std::size_t>(count), *dtype};
}

template <typename Array>
std::optional<Buffer> from_array(nb::handle x) {
    Array array;
    if (!nb::try_cast(x, array, false)) return std::nullopt;
    const std::optional<DType> dtype = dtype_of(array.dtype());
    if (!dtype) return std::nullopt;
    const void* memory = array.data();  // it stays: the caller holds `x`
    return Buffer{static_cast<char*>(const_cast<void*>(memory)), array.size(), *dtype};
}

Buffer from_python(nb::handle x, const char* verb, bool writable) {
    nb::object description = nb::module_::import_("hpdl_lab.comm.buffers").attr("buffer_of")(x, verb);
    if (writable && is_array(x) && !nb::cast<bool>(x.attr("flags").attr("writeable")))
        throw std::invalid_argument(std::string("cannot ") + verb + " a read-only array");
    const std::string name = nb::cast<std::string>(description.attr("dtype"));
    for (int i = 0; i < kDTypes; i++) {
        if (name != kDTypeInfo[i].name) continue;
        return {reinterpret_cast<char*>(nb::cast<std::uintptr_t>(description.attr("address"))),
                nb::cast<std::size_t>(description.attr("count")), static_cast<DType>(i)};
    }
    throw std::invalid_argument("dtype " + name + " is unknown");
}

}  // namespace

Buffer buffer_of(nb::handle x, const char* verb, bool writable) {
    if (std::optional<Buffer> buffer = from_tensor(x)) return *buffer;
    if (is_array(x)) {
        using Writable = nb::ndarray<nb::c_contig, nb::device::cpu>;
        using Readable = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
        if (std::optional<Buffer> buffer = writable ? from_array<Writable>(x) : from_array<Readable>(x)) return *buffer;
    }
    return from_python(x, verb, writable);
}

Buffer buffer_or_none(nb::handle x, const char* verb, bool writable) {
    return x.is_none() ? Buffer{nullptr, 0, DType::uint8} : buffer_of(x, verb, writable);
}

}  // namespace hpdl
