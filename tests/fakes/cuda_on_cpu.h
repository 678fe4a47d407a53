// CUDA's threads as coroutines of one CPU thread, to run kernels of csrc/cuda without a GPU: what they compute, whether
// every thread of a block comes to every barrier, and whether they read or write beyond their memory. It says nothing
// about time, nor about what only happens where threads run at once: a missing barrier may go unnoticed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#define __global__
#define __device__
#define __host__
#define __shared__ static

struct Index {
    unsigned x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

constexpr std::size_t kStack = 32 * 1024;
constexpr unsigned kLanes = 32;

struct Thread {
    ucontext_t context;  // where it begins
    jmp_buf here;        // where it goes on: swapcontext would call the system, for signals that nobody sends
    std::unique_ptr<char[]> stack{new char[kStack]};
    unsigned index;
    bool begun = false, done = false;
    unsigned barriers = 0, shuffles = 0;  // that it has come to
    float lane_value;
};

struct Block {
    std::vector<Thread> threads;
    jmp_buf scheduler;
    Thread* running = nullptr;
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
};
inline Block block;

inline void yield() {
    if (_setjmp(block.running->here) == 0) _longjmp(block.scheduler, 1);
}

inline void enter() {
    block.body(block.argument);
    block.running->done = true;
    _longjmp(block.scheduler, 1);
}

// All threads of `of` have come as far as `counter` of the one that runs.
template <typename Counter>
bool all_there(unsigned first, unsigned count, Counter counter) {
    for (unsigned i = first; i < first + count; i++) {
        if (counter(block.threads[i]) < counter(*block.running)) return false;
    }
    return true;
}

inline void resume(Thread& thread) {
    block.running = &thread;
    threadIdx.x = thread.index;
    if (_setjmp(block.scheduler) != 0) return;
    if (thread.begun) _longjmp(thread.here, 1);
    thread.begun = true;
    setcontext(&thread.context);
}

inline void run_block(unsigned threads) {
    if (block.threads.size() != threads) block.threads = std::vector<Thread>(threads);
    for (unsigned i = 0; i < threads; i++) {
        Thread& thread = block.threads[i];
        thread.index = i;
        thread.begun = thread.done = false;
        thread.barriers = thread.shuffles = 0;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = kStack;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, enter, 0);
    }
    const auto steps = [] {
        unsigned sum = 0;
        for (const Thread& t : block.threads) sum += t.barriers + t.shuffles + t.done;
        return sum;
    };
    for (unsigned left = threads, idle = 0; left > 0;) {
        const unsigned before = steps();
        left = 0;
        for (Thread& thread : block.threads) {
            if (!thread.done) resume(thread);
            left += !thread.done;
        }
        idle = steps() == before ? idle + 1 : 0;
        if (left > 0 && idle > 2) {
            std::fprintf(stderr, "%u of %u threads wait at a barrier that the others never come to\n", left, threads);
            std::exit(1);
        }
    }
}

// kernel<<<blocks, threads>>>(): body() is the call of the kernel, made by every thread of every block.
template <typename Body>
void launch(unsigned blocks, unsigned threads, Body body) {
    gridDim.x = blocks;
    blockDim.x = threads;
    block.body = [](void* argument) { (*static_cast<Body*>(argument))(); };
    block.argument = &body;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block(threads);
}

}  // namespace on_cpu

inline void __syncthreads() {
    using on_cpu::block;
    block.running->barriers++;
    const auto counter = [](const on_cpu::Thread& t) { return t.barriers; };
    while (!on_cpu::all_there(0, block.threads.size(), counter)) on_cpu::yield();
}

inline float __shfl_down_sync(unsigned, float value, int distance) {
    using on_cpu::block;
    on_cpu::Thread& self = *block.running;
    const unsigned first = self.index / on_cpu::kLanes * on_cpu::kLanes, from = self.index + distance;
    const auto counter = [](const on_cpu::Thread& t) { return t.shuffles; };
    self.lane_value = value;
    self.shuffles++;
    while (!on_cpu::all_there(first, on_cpu::kLanes, counter)) on_cpu::yield();
    const float other = from < first + on_cpu::kLanes ? block.threads[from].lane_value : value;
    self.shuffles++;  // nobody writes its value again before all have read it
    while (!on_cpu::all_there(first, on_cpu::kLanes, counter)) on_cpu::yield();
    return other;
}

inline void __stwb(uint4* to, uint4 value) { *to = value; }
