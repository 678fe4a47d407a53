// Waiting without ever blocking: everything that depends on another rank is an Operation that somebody advances.
#pragma once

#include <cstdint>
#include <ctime>
#include <vector>

namespace hpdl {

inline std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

class Operation {
  public:
    virtual ~Operation() = default;

    // Do what can be done now; true when all is done. Never blocks. Throws std::invalid_argument where ranks disagree.
    virtual bool advance() = 0;

    // Grows whenever a part has been done: a transfer that is slow is not one that is stuck.
    std::uint64_t progress() const { return progress_; }

  protected:
    std::uint64_t progress_ = 0;
};

// Advance until done, for `seconds` at most; true when done. Throws std::invalid_argument where a time is not a number.
//
// nap_s: 0 spins, which answers soonest; otherwise, when nothing has moved for a while, sleep so long between two
// looks. crowded: more ranks than cores: a spinning rank gives up the core at every look, since its peer may need it.
//
// others: advanced meanwhile, since somebody may wait for them who has to answer first. What they throw is left to
// those who wait for them.
bool wait(Operation& operation, double seconds, double nap_s, bool crowded, const std::vector<Operation*>& others = {});

}  // namespace hpdl
