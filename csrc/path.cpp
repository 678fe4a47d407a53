#include "path.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>

#include "progress.h"

namespace hpdl {

namespace {

constexpr std::size_t kFewest = 2048;  // bytes: below, `rep movsb` takes longer to begin than it gains

constexpr double kWorth = 0.9;  // of the first path's time has another one to take, which differs by more than noise
constexpr int kSums = 8;        // of which the fastest counts: others were interrupted
constexpr double kAlike = 1.5;  // times: so far apart, probes may be of one state
constexpr std::size_t kStates = 6;           // that are remembered; the oldest one is forgotten
constexpr std::int64_t kPeriod = 1'000'000;  // ns between two probes, at least
constexpr std::int64_t kRest = 200;          // times the length of a measurement or a probe, before the next one
constexpr std::int64_t kKeep = 10'000;  // times its length, a measurement counts: other programs may have disturbed it

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

bool is_alike(std::int64_t a, std::int64_t b) {
    return static_cast<double>(std::max(a, b)) <= kAlike * static_cast<double>(std::min(a, b));
}

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

void Choice::forget() {
    path_ = kMeasure;
    states_.clear();
    measure_at_ = 0;
}

std::uint8_t Choice::path() { return path_ == kMeasure || now_ns() < probe_at_ ? path_ : kProbe; }

std::int64_t Choice::read_ns() const { return *std::min_element(read_ns_.begin(), read_ns_.end()); }

const Choice::State& Choice::state_of(std::int64_t read_ns) const {
    const auto apart = [=](const State& state) {
        const auto [least, most] = std::minmax(state.read_ns, read_ns);
        return static_cast<double>(most) / static_cast<double>(least);
    };
    return *std::min_element(states_.begin(), states_.end(),
                             [&](const State& a, const State& b) { return apart(a) < apart(b); });
}

void Choice::probed(std::int64_t ns, std::int64_t all_ns) {
    probe_at_ = now_ns() + std::max(kPeriod, kRest * all_ns);
    std::rotate(read_ns_.begin(), read_ns_.begin() + 1, read_ns_.end());
    read_ns_.back() = played_ns_ ? played_ns_ : std::max<std::int64_t>(1, ns);
    if (!states_.empty()) take();
}

void Choice::take() {
    const State& state = state_of(read_ns());
    const std::int64_t now = now_ns();
    const bool is_known = state.is_sure && is_alike(state.read_ns, read_ns()) && now < state.until;
    path_ = !is_known && now > measure_at_ ? kMeasure : state.best;
}

void Choice::begin() {
    begun_ = now_ns();
    tried_ = {};
    tried_.read_ns = read_ns();
    tried_.is_sure = true;
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

std::uint8_t Choice::end() {
    const std::int64_t now = now_ns();
    tried_.best = best_;
    tried_.took_ns = now - begun_;
    compare();
    if (played_ns_ == 0) measure_at_ = now + kRest * tried_.took_ns;  // a test does not wait
    tried_.until = played_ns_ ? std::numeric_limits<std::int64_t>::max() : now + kKeep * tried_.took_ns;
    const auto is_out_of_date = [this](const State& state) {
        return !state.is_sure || is_alike(state.read_ns, tried_.read_ns);
    };
    if (tried_.is_sure) std::erase_if(states_, is_out_of_date);
    if (tried_.is_sure && states_.size() == kStates) states_.erase(states_.begin());
    if (tried_.is_sure || states_.empty()) states_.push_back(tried_);
    return path_ = state_of(read_ns()).best;
}

void Choice::compare() { tried_.is_sure = tried_.is_sure && is_alike(tried_.read_ns, read_ns()); }

void Choice::took(std::int64_t ns) {
    around_ += kTrial;
    std::int64_t& least = tried_.ns[trial_];
    if (around_ > warm_up() && (least == 0 || ns < least)) least = ns;
}

// Bytes; once more for the first path, which finds pages that are not mapped yet.
std::size_t Choice::warm_up() const { return (trial_ == 0 ? 2 : 1) * kPaths[trial_].ring; }

std::uint8_t Choice::find_best() const {
    std::uint8_t best = 0;
    for (std::uint8_t i = 1; i < kPaths.size(); i++) {
        const double least = static_cast<double>(tried_.ns[best]) * (best == 0 ? kWorth : 1);
        if (tried_.ns[i] > 0 && static_cast<double>(tried_.ns[i]) < least) best = i;
    }
    return best;
}

std::string Choice::State::text() const {
    const auto us = [](std::int64_t ns) { return std::to_string((ns + 500) / 1000); };
    const auto row = [&](std::size_t i) { return describe(kPaths[i]) + (ns[i] ? " " + us(ns[i]) : ""); };
    std::string others;
    for (std::size_t i = 0; i < kPaths.size(); i++) {
        if (ns[i] > 0 && i != best) others += (others.empty() ? "; also tried: " : ", ") + row(i);
    }
    return row(best) + others + " (us to write, add and read " + size_text(kTrial) + ")" + " (measured in " +
           us(took_ns) + " us, while another rank's note was read in " + std::to_string(read_ns) + " ns" +
           (is_sure ? ")" : "; the state has changed meanwhile)");
}

std::string Choice::text() const {
    if (states_.empty()) return "not measured yet: no tensor was large enough, or all were registered";
    std::string lines;
    for (const State& state : states_) lines += (lines.empty() ? "" : "; in another state: ") + state.text();
    return lines;
}

}  // namespace hpdl
