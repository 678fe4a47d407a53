#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "device.h"
#include "one_pass.h"
#include "reduction.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hpdl::cuda {

namespace {

// Addresses and streams travel as integers, as torch has them: data_ptr() and cuda_stream.
template <typename T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <typename Memory>
std::uintptr_t address_of(const Memory& memory) {
    return reinterpret_cast<std::uintptr_t>(memory.data());
}

int device_count() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
}

}  // namespace

NB_MODULE(_cuda, m) {
    m.doc() = "CUDA kernels, and GPU memory that processes share. Every kernel works on the current device.";
    nb::set_leak_warnings(false);  // what a notebook still holds when it ends is no leak
    nb::exception<CudaError>(m, "CudaError", PyExc_RuntimeError);
    m.def("device_count", &device_count, "GPUs here; CudaError with the reason if there are none.");
    m.def("memory_bandwidth", &memory_bandwidth, "device"_a, "Bytes/s that the device's memory can move at most.");

    nb::class_<DeviceMemory>(m, "DeviceMemory", "Zeroed GPU memory that other processes can open by its handle.")
        .def(nb::init<int, std::size_t>(), "device"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("address", &address_of<DeviceMemory>)
        .def_prop_ro("nbytes", &DeviceMemory::nbytes)
        .def("handle", [](const DeviceMemory& self) {
            const std::string handle = self.handle();
            return nb::bytes(handle.data(), handle.size());
        });
    nb::class_<PeerMemory>(m, "PeerMemory", "The GPU memory of another process, opened by its handle.")
        .def(
            "__init__",
            [](PeerMemory* self, int device, const nb::bytes& handle) {
                new (self) PeerMemory(device, std::string(handle.c_str(), handle.size()));
            },
            "device"_a, "handle"_a)
        .def_prop_ro("address", &address_of<PeerMemory>);

    m.def(
        "one_pass",
        [](const std::vector<std::uintptr_t>& tensors, std::size_t first, std::size_t count, int dtype,
           std::uintptr_t stream) {
            std::vector<void*> addresses;
            for (std::uintptr_t tensor : tensors) addresses.push_back(at<void>(tensor));
            one_pass(addresses.data(), static_cast<int>(addresses.size()), first, count, static_cast<DType>(dtype),
                     at<CUstream_st>(stream));
        },
        "tensors"_a, "first"_a, "count"_a, "dtype"_a, "stream"_a,
        "Launch: elements [first, first + count) of all tensors become their sum. dtype: index in buffers.DTYPES.");

    m.def("rungs", [] {
        nb::list ladder;
        for (const Rung& rung : rungs()) ladder.append(nb::make_tuple(rung.name, rung.change));
        return ladder;
    });
    m.def("partials", &partials, "rung"_a, "n"_a, "Floats that `time_reduce` needs in `partial` for n elements.");
    m.def(
        "time_reduce",
        [](int rung, int dtype, std::uintptr_t x, std::size_t n, std::uintptr_t partial, std::uintptr_t out,
           std::uintptr_t stream, int repeats) {
            return time_reduce(rung, static_cast<DType>(dtype), at<void>(x), n, at<float>(partial), at<float>(out),
                               at<CUstream_st>(stream), repeats);
        },
        "rung"_a, "dtype"_a, "x"_a, "n"_a, "partial"_a, "out"_a, "stream"_a, "repeats"_a,
        nb::call_guard<nb::gil_scoped_release>(), "Sum x into out, `repeats` times; returns microseconds of each.");
}

}  // namespace hpdl::cuda
