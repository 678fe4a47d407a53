#include "operation.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

namespace hpdl {

namespace {

constexpr int kSpinsPerLook = 16;                    // at the clock, which costs as much as some looks at shared memory
constexpr double kLongest = 1e6, kLongestNap = 0.5;  // s
constexpr auto kIdleBeforeNap = std::chrono::microseconds(500);

void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void advance_all(const std::vector<Operation*>& operations) {
    for (Operation* operation : operations) {
        try {
            if (operation) operation->advance();  // None comes as a null pointer
        } catch (const std::exception&) {         // it throws again when it is asked for itself
        }
    }
}

}  // namespace

bool wait(Operation& operation, double seconds, double nap_s, bool crowded, const std::vector<Operation*>& others) {
    using Clock = std::chrono::steady_clock;
    if (std::isnan(seconds) || std::isnan(nap_s)) throw std::invalid_argument("a time to wait that is not a number");
    seconds = std::clamp(seconds, 0.0, kLongest);
    advance_all(others);
    if (operation.advance()) return true;
    const timespec nap = {0, static_cast<long>(std::clamp(nap_s, 0.0, kLongestNap) * 1e9)};
    auto moved = Clock::now();
    const auto end = moved + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    bool napping = false;
    for (int spins = 1;; spins++) {
        const std::uint64_t before = operation.progress();
        advance_all(others);
        if (operation.advance()) return true;
        const bool idle = operation.progress() == before;
        if (idle) {
            if (napping) {
                nanosleep(&nap, nullptr);  // a signal ends it early, which is welcome: the caller looks at signals
            } else if (crowded) {
                sched_yield();
            } else {
                pause_core();
            }
        }
        if (idle && !napping && !crowded && spins % kSpinsPerLook != 0) continue;
        const auto now = Clock::now();
        if (now >= end) return false;
        if (!idle) moved = now;
        napping = nap_s > 0 && now - moved > kIdleBeforeNap;
    }
}

}  // namespace hpdl
