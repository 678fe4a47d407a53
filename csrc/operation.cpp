#include "operation.h"

#include <sched.h>
#include <time.h>

#include <chrono>

namespace hpdl {

namespace {

constexpr int kSpinsPerYield = 1000;  // some 20 us: longer than a message in flight, shorter than a time slice

void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

bool wait(Operation& operation, double seconds, double nap_s, bool crowded) {
    using Clock = std::chrono::steady_clock;
    if (operation.advance()) return true;
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    const timespec nap = {0, static_cast<long>(nap_s * 1e9)};
    for (int spins = 1;; spins++) {
        if (nap_s > 0) {
            nanosleep(&nap, nullptr);  // a signal ends it early, which is welcome: the caller looks at signals
        } else if (crowded || spins % kSpinsPerYield == 0) {
            sched_yield();
        } else {
            pause_core();
        }
        if (operation.advance()) return true;
        // Reading the clock costs as much as a look at shared memory, so not at every spin.
        if ((nap_s > 0 || crowded || spins % 16 == 0) && Clock::now() >= end) return false;
    }
}

}  // namespace hpdl
