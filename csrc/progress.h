// Waiting without ever blocking: everything that depends on another rank is an Operation that somebody advances, either
// the rank that waits for it or, while the rank computes, a thread that knows no Python.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "buffer.h"

namespace hpdl {

class Operation {
  public:
    virtual ~Operation() = default;

    // Do what can be done now; true when all is done. Never blocks. Throws std::invalid_argument if ranks disagree.
    virtual bool advance() = 0;

    // Grows whenever a part has been done: a transfer that is slow is not one that is stuck.
    virtual std::uint64_t progress() const { return progress_; }

    // What every rank meant, if they disagreed; else nothing.
    virtual std::vector<Call> calls() const { return {}; }

    // The ranks that this one waits for, as far as that is known.
    virtual std::vector<int> missing() const { return {}; }

    // Called when a wait for it begins and ends.
    virtual void begin_wait() {}
    virtual void end_wait() {}

  protected:
    std::uint64_t progress_ = 0;
};

// Advance until done, for `seconds` at most; true when done. Throws std::invalid_argument if a time is not a number.
//
// nap_s: 0 spins, which answers soonest; otherwise, when nothing has moved for a while, sleep so long between two
// looks. oversubscribed: more ranks than cores: a spinning rank gives up the core at every look, since its peer may
// need it.
//
// others: advanced meanwhile, since somebody may wait for them who has to answer first. What they throw is left to
// those who wait for them.
bool wait(Operation& operation, double seconds, double nap_s, bool oversubscribed,
          const std::vector<Operation*>& others = {});

// CLOCK_MONOTONIC, as Python's time.monotonic_ns.
std::int64_t now_ns();

// What a task does: each part begins when the one before it has ended.
struct Parts {
    // Begin, and return the operation, which lives at least until its part has ended. Throws std::invalid_argument for
    // tensors that will not do.
    using Begin = std::function<std::shared_ptr<Operation>()>;

    std::vector<Begin> begin;
    bool uses_mpi;  // does MPI write to its memory, also when nobody advances it?
};

class Progress;

class Task : public Operation {
  public:
    // Advance the queue; true when this task has ended. Throws what it ended with, at every call.
    bool advance() override;

    bool has_ended() const { return ended_.load(std::memory_order_acquire); }
    std::uint64_t progress() const override { return moved_.load(std::memory_order_relaxed); }
    std::vector<Call> calls() const override { return has_ended() ? calls_ : std::vector<Call>{}; }
    std::vector<int> missing() const override;
    void begin_wait() override;
    void end_wait() override;

    // After the end. Times of now_ns(); 0 if it has never begun.
    std::int64_t t0_ns() const { return has_ended() ? t0_ns_ : 0; }
    std::int64_t t1_ns() const { return has_ended() ? t1_ns_ : 0; }
    const Operation* last() const { return has_ended() ? now_.get() : nullptr; }  // that has begun

  private:
    friend class Progress;
    Task(Progress& queue, Parts parts, std::shared_ptr<void> memory);

    bool go_on();
    void end();

    Progress& queue_;
    std::shared_ptr<void> memory_;  // of the tensors: lives as long as the task
    Parts parts_;
    std::size_t part_ = 0;
    std::shared_ptr<Operation> now_;  // of parts_.begin[part_], once it has begun
    std::exception_ptr error_;
    std::vector<Call> calls_;
    std::int64_t t0_ns_ = 0, t1_ns_ = 0;
    std::atomic<std::uint64_t> moved_{0};
    std::atomic<bool> ended_{false};
};

// The tasks of one communicator, one after the other, which a thread advances while the rank computes.
//
//     rank    add(A) add(B) ... compute ...... A.wait() compute ...... B.wait()
//     queue            A A A A A A A A B B B B B B B B B B B B
//     who advances     thread thread   rank   thread ........ rank
//
// A rank that waits advances the queue itself, and the thread rests meanwhile: it would only take the core away. It
// also rests while there is nothing to do, which then costs nothing.
class Progress {
  public:
    Progress() = default;
    // `stop`, and what has not ended is dropped.
    ~Progress();
    Progress(const Progress&) = delete;

    // Append a task; never waits. memory: whatever has to live as long as the task.
    // Throws std::runtime_error after `stop`, and in a process that is a copy of the one with the thread.
    std::shared_ptr<Task> add(Parts parts, std::shared_ptr<void> memory);

    // End the thread, soon. What has not ended never will, and keeps its memory as long as this lives. True if MPI may
    // still write to that.
    bool stop();

    // Free the tasks that have ended, with their memory: neither the thread nor a wait does that.
    void free_ended();

  private:
    friend class Task;
    bool advance();
    bool is_copy() const;
    void run();

    mutable std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Task>> queue_, ended_;
    std::atomic<int> waiting_{0};          // ranks that wait for a task
    std::unique_ptr<std::thread> thread_;  // from the first task on
    pid_t process_ = 0;                    // in which the thread is
    bool stopping_ = false;
};

}  // namespace hpdl
