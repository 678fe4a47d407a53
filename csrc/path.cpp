#include "path.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

#include "progress.h"

namespace hpdl {

namespace {

constexpr std::size_t kFewest = 2048;  // bytes: below, `rep movsb` takes longer to begin than it gains

constexpr double kWorth = 0.9;  // of the first path's time has another one to take, which differs by more than noise
constexpr int kSums = 8;        // of which the fastest counts: others were interrupted
constexpr int kWindow = 16;     // calls of a kind, whose fastest counts: others were interrupted
constexpr double kChanged = 2;  // times
constexpr std::int64_t kRest = 200;  // times the length of a measurement, before the next one

#if defined(__x86_64__)
// Whether the processor has a fast `rep movsb` (ERMS: bit 9 of EBX, leaf 7).
bool has_fast_movsb() {
    unsigned a, b = 0, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 9 & 1);
}

// memcpy takes `rep movsb` for so many bytes, on some processors and in some C libraries.
template <void (*store)(__m128i*, __m128i)>
void copy_lines(char* to, const char* from, std::size_t nbytes) {
    for (; nbytes >= kLine; to += kLine, from += kLine, nbytes -= kLine) {
        for (std::size_t i = 0; i < kLine; i += 16)
            store(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    std::memcpy(to, from, nbytes);
}

void ordinary(__m128i* to, __m128i value) { _mm_store_si128(to, value); }
void past_caches(__m128i* to, __m128i value) { _mm_stream_si128(to, value); }
#endif

std::string size_text(std::size_t nbytes) {
    return nbytes % (1024 * kKiB) ? std::to_string(nbytes / kKiB) + " KiB"
                                  : std::to_string(nbytes / (1024 * kKiB)) + " MiB";
}

}  // namespace

std::string describe(const Path& path) {
    return "in chunks of up to " + size_text(path.chunk) + " around at least " + size_text(path.ring) + " by " +
           kWays[static_cast<int>(path.way)];
}

bool is_possible(Way way) {
#if defined(__x86_64__)
    static const bool movsb = has_fast_movsb();
    return way != Way::string || movsb;
#else
    return way == Way::stores;
#endif
}

void copy(Way way, char* to, const Buffer& from) {
    std::size_t nbytes = from.nbytes();
    if (nbytes == 0) return;
    const char* at = from.data;
#if defined(__x86_64__)
    if (way == Way::string && nbytes >= kFewest && is_possible(way)) {
        asm volatile("rep movsb" : "+D"(to), "+S"(at), "+c"(nbytes) : : "memory");
        return;
    }
    if (way == Way::stores && nbytes >= kFewest) return copy_lines<ordinary>(to, at, nbytes);
    if (way == Way::past_caches && nbytes >= kFewest) {
        copy_lines<past_caches>(to, at, nbytes);
        return _mm_sfence();  // the barrier that follows is an ordinary store
    }
#endif
    std::memcpy(to, at, nbytes);
}

Choice& Choice::of(int size) {
    static std::mutex mutex;
    static std::map<int, Choice> choices;
    const std::lock_guard lock(mutex);
    return choices[size];
}

void Choice::begin() {
    begun_ = now_ns();
    ns_.fill(0);
    exchange_ns_.fill(0);
    kinds_.clear();
    trial_ = around_ = 0;
    is_last_ = false;
}

std::size_t Choice::next() {
    if (around_ < warm_up() + kSums * kTrial) return trial_;
    around_ = 0;
    trial_ = is_last_ ? kFewestBarriers : trial_ + 1;
    while (trial_ < kFewestBarriers && !is_possible(kPaths[trial_].way)) trial_++;
    if (trial_ < kFewestBarriers) return trial_;
    if (find_best() != 0 && !is_last_) {  // the first one may have suffered from being the first
        is_last_ = true;
        return trial_ = 0;
    }
    best_ = find_best();
    return kPaths.size();
}

void Choice::exchanged(bool reads, std::int64_t ns) {
    std::int64_t& least = exchange_ns_[reads];
    least = least == 0 ? ns : std::min(least, ns);
}

void Choice::end() {
    path_ = best_ + (reads() ? kReads : 0);
    times_++;
    took_ = now_ns() - begun_;
}

void Choice::took(std::int64_t ns) {
    around_ += kTrial;
    if (around_ > warm_up() && (ns_[trial_] == 0 || ns < ns_[trial_])) ns_[trial_] = ns;
}

// Bytes; once more for the first path, which finds pages that are not mapped yet.
std::size_t Choice::warm_up() const { return (trial_ == 0 ? 2 : 1) * kPaths[trial_].ring; }

std::uint8_t Choice::find_best() const {
    std::uint8_t best = 0;
    for (std::uint8_t i = 1; i < kPaths.size(); i++) {
        const double least = static_cast<double>(ns_[best]) * (best == 0 ? kWorth : 1);
        if (ns_[i] > 0 && static_cast<double>(ns_[i]) < least) best = i;
    }
    return best;
}

void Choice::watch(const Call& call, std::size_t nbytes, std::int64_t ns) {
    std::uint64_t collective;  // no two of them begin with the same 8 letters
    std::memcpy(&collective, call.name, sizeof collective);
    Kind& kind = kinds_[{collective, call.dtype, static_cast<int>(std::bit_width(nbytes)), call.root == 0}];
    const double each = static_cast<double>(ns) / static_cast<double>(nbytes);
    kind.least = kind.calls == 0 || each < kind.least ? each : kind.least;
    if (++kind.calls < kWindow) return;
    kind.calls = 0;
    if (kind.promised == 0) kind.promised = kind.least;
    const bool changed = kind.least > kChanged * kind.promised || kind.promised > kChanged * kind.least;
    if (changed && now_ns() > begun_ + kRest * took_) path_ = kMeasure;
}

std::string Choice::text() const {
    const auto us = [](std::int64_t ns) { return std::to_string((ns + 500) / 1000); };
    const auto row = [&](std::size_t i) { return describe(kPaths[i]) + (ns_[i] ? " " + us(ns_[i]) : ""); };
    if (times_ == 0) return "not measured yet: no tensor was large enough";
    std::string others;
    for (std::size_t i = 0; i < kPaths.size(); i++) {
        if (ns_[i] > 0 && i != best_) others += (others.empty() ? "; also tried: " : ", ") + row(i);
    }
    const std::string exchanges =
        exchange_ns_[1] == 0 ? ", and no rank may read another one's memory"
                             : "; exchanges of " + size_text(kExchange) + " and more are " +
                                   (reads() ? "read where they are, in " + us(exchange_ns_[1]) + " us (staged: "
                                            : "staged, too, in " + us(exchange_ns_[0]) + " us (read where they are: ") +
                                   us(exchange_ns_[!reads()]) + ")";
    return row(best_) + others + " (us to write, add and read " + size_text(kTrial) + ")" + exchanges + " (measured " +
           (times_ == 1 ? "once, in " : std::to_string(times_) + " times, lately in ") + us(took_) + " us)";
}

}  // namespace hpdl
