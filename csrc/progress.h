// What goes on beside a rank: operations of one communicator, one after the other, advanced by a thread that knows no
// Python while the rank computes.
//
//     rank    add(A) add(B) ... compute ...... A.wait() compute ...... B.wait()
//     queue            A A A A A A A A B B B B B B B B B B B B
//     who advances     thread thread   rank   thread ........ rank
//
// Whoever waits advances the queue himself, and the thread rests meanwhile: it would only take the core away. It also
// rests while there is nothing to do, which then costs nothing.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "agreement.h"
#include "operation.h"

namespace hpdl {

class Progress;

// One part of a task, which begins when the part before it has ended.
class Part {
  public:
    virtual ~Part() = default;
    // Begin. Throws std::invalid_argument for tensors that will not do.
    virtual Operation& begin() = 0;
    // Does MPI write to its memory, also when nobody advances it?
    virtual bool uses_mpi() const = 0;
    // What every rank meant, where they disagreed; else nothing.
    virtual std::vector<Call> calls() const { return {}; }
    // The ranks that this one waits for, as far as that is known.
    virtual std::vector<int> missing() const { return {}; }
};

class Task : public Operation {
  public:
    ~Task() override = default;

    // Let the queue go on; true when this task has ended. Throws what it ended with, at every call.
    bool advance() override;

    Progress& progress_of() const { return progress_of_; }
    bool has_ended() const { return ended_.load(std::memory_order_acquire); }
    // Grows as progress() does, whoever advances it.
    std::uint64_t moved() const { return moved_.load(std::memory_order_relaxed); }
    std::vector<int> missing() const;

    // After the end. Times of CLOCK_MONOTONIC, as Python's; 0 where it has never begun.
    std::vector<Call> calls() const { return calls_; }
    std::int64_t t0_ns() const { return t0_ns_; }
    std::int64_t t1_ns() const { return t1_ns_; }
    const Operation* last() const { return now_; }  // that has begun; null where none has

  private:
    friend class Progress;
    Task(Progress& progress, std::vector<std::unique_ptr<Part>> parts, std::shared_ptr<void> memory);

    bool go_on();
    void end();
    bool uses_mpi() const;

    Progress& progress_of_;
    std::shared_ptr<void> memory_;  // of the tensors: lives as long as the task
    std::vector<std::unique_ptr<Part>> parts_;
    std::size_t part_ = 0;
    Operation* now_ = nullptr;  // of parts_[part_], once it has begun
    std::exception_ptr error_;
    std::vector<Call> calls_;
    std::int64_t t0_ns_ = 0, t1_ns_ = 0;
    std::atomic<std::uint64_t> moved_{0};
    std::atomic<bool> ended_{false};
};

class Progress {
  public:
    Progress() = default;
    // `stop`, and what has not ended is forgotten.
    ~Progress();
    Progress(const Progress&) = delete;

    // Append a task; never waits. memory: whatever has to live as long as the task.
    // Throws std::runtime_error after `stop`, and in a process that is a copy of the one with the thread.
    std::shared_ptr<Task> add(std::vector<std::unique_ptr<Part>> parts, std::shared_ptr<void> memory);

    // End the thread, soon. What has not ended never will, and keeps its memory as long as this lives. True where MPI
    // may still write to that.
    bool stop();

    // Forget the tasks that have ended, with their memory: neither the thread nor a wait does that.
    void forget_ended();

    // Within it, whoever waits advances the tasks and the thread rests.
    class Helping {
      public:
        explicit Helping(Progress& progress);
        ~Helping();

      private:
        Progress& progress_;
    };

  private:
    friend class Task;
    bool advance();
    bool is_copy() const;
    void run();

    mutable std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Task>> queue_, ended_;
    std::atomic<int> helpers_{0};
    std::unique_ptr<std::thread> thread_;  // from the first task on
    pid_t process_ = 0;                    // in which the thread is
    bool stopping_ = false;
};

// `wait` of operation.h for a task.
bool wait_for(Progress& progress, Task& task, double seconds, double nap_s, bool crowded,
              const std::vector<Operation*>& others = {});

}  // namespace hpdl
