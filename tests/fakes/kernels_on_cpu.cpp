// Runs the kernels of csrc/cuda on the CPU, over sizes and alignments, in memory that ends where a page ends: reading
// or writing one element too far stops the program. Prints how many cases were right; exit code 1 at the first wrong
// one.
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_on_cpu.h"
#include "one_pass_kernels.cuh"
#include "reduction_kernels.cuh"

using namespace hpdl::cuda;

namespace {

constexpr std::size_t kPages = 64 * 4096;
int cases = 0;

// n elements of T that end `room` elements before memory that nobody may touch; so they begin off any boundary.
template <typename T>
struct Guarded {
    char* memory;
    T* data;

    Guarded(std::size_t n, std::size_t room) {
        memory = static_cast<char*>(
            mmap(nullptr, kPages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(memory + kPages, 4096, PROT_NONE);
        data = reinterpret_cast<T*>(memory + kPages) - room - n;
    }
    ~Guarded() { munmap(memory, kPages + 4096); }
};

float number(std::size_t i, std::size_t seed) { return static_cast<float>((i * 7 + seed * 13) % 17) - 8; }

template <typename T>
T from(float x) {
    return Element<T>::round(static_cast<typename Element<T>::Sum>(x));
}

void fail(const char* what, const char* type, std::size_t n, std::size_t room, double found, double expected) {
    std::fprintf(stderr, "%s of %zu %s, %zu before the end: %g instead of %g\n", what, n, type, room, found, expected);
    std::exit(1);
}

template <typename T>
void ladder(const char* type, std::size_t n, std::size_t room) {
    Guarded<T> x(n, room);
    double expected = 0;
    for (std::size_t i = 0; i < n; i++) {
        x.data[i] = from<T>(number(i, n));
        expected += number(i, n);
    }
    const auto check = [&](const char* name, std::size_t blocks_wanted, auto kernel) {
        const auto blocks = static_cast<unsigned>(blocks_wanted ? blocks_wanted : 1);
        Guarded<float> partial(blocks, 0), out(1, 0);
        *out.data = NAN;
        on_cpu::launch(blocks, kThreads, [&] { kernel(x.data, n, partial.data); });
        on_cpu::launch(1, kLastThreads, [&] { second_pass(partial.data, blocks, out.data); });
        if (*out.data != expected) fail(name, type, n, room, *out.data, expected);
        cases++;
    };
    const std::size_t ones = (n + kThreads - 1) / kThreads, twos = (n + 2 * kThreads - 1) / (2 * kThreads);
    check("interleaved", ones, interleaved<T>);
    check("compacted", ones, compacted<T>);
    check("sequential", ones, sequential<T>);
    check("added_on_load", twos, added_on_load<T>);
    check("shuffled", twos, shuffled<T>);
    for (std::size_t blocks : {1, 3}) {  // few, so that every thread goes round more than once
        check("strided", blocks, strided<T>);
        check("vectorized", blocks, vectorized<T, 1>);
        check("in flight", blocks, vectorized<T, 4>);
    }
}

template <typename T>
void one_pass(const char* type, std::size_t n, std::size_t room, std::size_t first, std::size_t count, bool alike) {
    constexpr int kRanks = 3;
    std::vector<std::unique_ptr<Guarded<T>>> memory;
    Tensors<T> tensors{};
    tensors.ranks = kRanks;
    for (int r = 0; r < kRanks; r++) {
        memory.push_back(std::make_unique<Guarded<T>>(n, room + (alike ? 0 : r)));
        for (std::size_t i = 0; i < n; i++) memory[r]->data[i] = from<T>(number(i, r) + 8);
        tensors.of[r] = memory[r]->data + first;
    }
    std::size_t lead = before_packets(tensors.of[0], count);
    for (int r = 1; r < kRanks; r++) {
        if (before_packets(tensors.of[r], count) != lead) lead = count;
    }
    const std::size_t packets = (count - lead) / Packet<T>::kElements;
    on_cpu::launch(2, kOnePassThreads, [&] { add_slices(tensors, lead, packets, count); });
    for (int r = 0; r < kRanks; r++) {
        for (std::size_t i = 0; i < n; i++) {
            double expected = number(i, r) + 8;
            if (first <= i && i < first + count) expected = number(i, 0) + number(i, 1) + number(i, 2) + 24;
            const double found = static_cast<double>(Element<T>::widen(memory[r]->data[i]));
            if (found != expected) fail("one_pass", type, n, room, found, expected);
        }
    }
    cases++;
}

template <typename T>
void all_sizes(const char* type, bool is_float) {
    for (std::size_t room : {0, 3}) {
        for (std::size_t n : {0, 1, 7, 257, 7001}) {
            if constexpr (sizeof(T) <= 4) {
                if (is_float) ladder<T>(type, n, room);
            }
            one_pass<T>(type, n, room, 0, n, true);
        }
        one_pass<T>(type, 1001, room, 64, 640, true);
        one_pass<T>(type, 1001, room, 64, 640, false);  // tensors that do not lie alike: no packets
    }
}

}  // namespace

int main() {
    all_sizes<float>("float32", true);
    all_sizes<__half>("float16", true);
    all_sizes<__nv_bfloat16>("bfloat16", true);
    all_sizes<double>("float64", false);
    all_sizes<int>("int32", false);
    all_sizes<long long>("int64", false);
    all_sizes<unsigned char>("uint8", false);
    std::printf("%d cases\n", cases);
}
