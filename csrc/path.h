// How tensors of any origin go through the memory that ranks share, which each group of ranks finds out by trying.
//
// An ordinary store to memory that another core has just read waits until that core has given up its copy of the line.
// How long depends on the processor, and on which of its cores the ranks are on: on one and the same virtual machine it
// was 0.04 to 0.6 ns a byte. It helps to copy in another way, or to write so much other memory in between that the line
// has left the other core's cache. Neither is best everywhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "buffer.h"

namespace hpdl {

enum class Way : std::uint8_t { string, stores, past_caches };
constexpr const char* kWays[] = {"rep movsb", "ordinary stores", "stores past the caches"};

// In chunks, each rank's one behind the other around a ring, which holds three of them.
struct Path {
    Way way;
    std::size_t chunk;  // bytes of the longest
    std::size_t ring;   // bytes around which shorter ones go, too
};

constexpr std::size_t kLine = 64;  // bytes of a cache line, which two ranks should not write at once
constexpr std::size_t kKiB = 1024, kRing = 3072 * kKiB;  // of the longest ring
// Broadcast has shorter chunks, around a shorter ring of its own: one rank copies in, and the others wait for its first
// chunk. Where cores share a cache, 1 MiB takes 0.55 times as long as in whole chunks, and 4 MiB 0.7 times as long as
// around the whole ring. Collectives in which all ranks copy in gain nothing.
constexpr int kBroadcastParts = 4;
constexpr std::size_t kArea = kRing + kRing / kBroadcastParts;  // of one rank
// The first one is taken until something has been measured, the last one, untried, where ranks take turns on their
// cores.
constexpr std::array<Path, 5> kPaths = {{
    {Way::string, 256 * kKiB, 256 * kKiB},   // short tensors stay in a core's own cache
    {Way::string, 256 * kKiB, 1024 * kKiB},  // they leave it, and so the other cores'
    {Way::stores, 256 * kKiB, 1024 * kKiB},
    {Way::past_caches, 256 * kKiB, 1024 * kKiB},
    {Way::string, 1024 * kKiB, 512 * kKiB},  // the fewest barriers
}};
constexpr std::uint8_t kFewestBarriers = kPaths.size() - 1;
constexpr std::size_t kTrial = 64 * kKiB;  // bytes of the sums by which they are compared: a short tensor's
constexpr std::uint8_t kMeasure = 255;     // in place of a path: all ranks are to measure
constexpr std::uint8_t kProbe = 254;  // in place of a path: all keep theirs, and rank 0 finds out the machine's state
constexpr std::size_t kProbes = 3;    // whose fastest counts: others were interrupted

std::string describe(const Path& path);  // "in chunks of up to 256 KiB around at least 1 MiB by rep movsb"

// Can this processor copy so?
bool is_possible(Way way);

// Copy to memory that other ranks have read; `to` begins with a cache line. Nothing is copied from a tensor without
// elements, which may have no address.
void copy(Way way, char* to, const Buffer& from);

// What rank 0 of a group of so many ranks has measured, for each state of the machine that it has met: a virtual
// machine may change its state several times a second, if its host moves it to other cores. A probe tells them apart:
// how long it takes to read what other ranks have just written. It lasts longer than the group: every run makes
// a new one. No lock: groups in the background, which another thread advances, take turns on their cores and have none.
class Choice {
  public:
    // Of this process, for groups of `size` ranks.
    static Choice& of(int size);

    void forget();  // all, and measure. For tests
    // Take `ns` for what probes find, and neither rest nor forget; 0: what they find. For tests.
    void play(std::int64_t ns) { played_ns_ = ns; }

    std::uint8_t path();  // kMeasure or kProbe if that is due

    // All other ranks have written a note. Reading the slowest of them has taken `ns`, and reading all `all_ns`.
    void probed(std::int64_t ns, std::int64_t all_ns);

    // Measure: begin, after kProbes probes; then sums of kTrial bytes by the path `next`, until that is kPaths.size(),
    // which sets `best`. Each path goes once around its ring, so that the other cores' caches hold what they would
    // hold, then the fastest one of several sums counts.
    void begin();
    std::size_t next();
    std::uint8_t best() const { return best_; }
    void took(std::int64_t ns);
    void compare();      // after kProbes probes, between two paths: is the machine's state still the same?
    std::uint8_t end();  // after kProbes more; the path from now on

    std::string text() const;  // of each state: `describe`, us of the fastest sum, and what else was tried

  private:
    struct State {
        std::int64_t read_ns = 0;                      // of probes
        bool is_sure = false;                          // was it the same state from the first to the last trial?
        std::uint8_t best = 0;                         // of kPaths
        std::array<std::int64_t, kPaths.size()> ns{};  // of the fastest sum; 0: not tried
        std::int64_t took_ns = 0, until = 0;           // to measure; when it is out of date

        std::string text() const;
    };

    std::int64_t read_ns() const;                       // by the last kProbes probes
    const State& state_of(std::int64_t read_ns) const;  // the most similar one; there is one
    void take();                                        // the path of the state in which the machine is
    std::size_t warm_up() const;
    std::uint8_t find_best() const;

    std::uint8_t path_ = kMeasure;
    std::int64_t played_ns_ = 0;
    std::array<std::int64_t, kProbes> read_ns_{};  // of the last ones
    std::int64_t probe_at_ = 0, measure_at_ = 0;   // when the next one is due, or allowed
    std::vector<State> states_;

    State tried_;  // which is being measured
    std::uint8_t best_ = 0;
    std::size_t trial_ = 0, around_ = 0;  // the path that is tried; bytes that it has gone around its ring
    bool is_last_ = false;                // is this the last trial?
    std::int64_t begun_ = 0;
};

}  // namespace hpdl
