#include "progress.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

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

struct Wait {
    Operation& operation;
    explicit Wait(Operation& waited_for) : operation(waited_for) { operation.begin_wait(); }
    ~Wait() { operation.end_wait(); }
    Wait(const Wait&) = delete;
};

// A look at memory that another rank writes, some of these, then naps: the rank computes on the same core. Tried, with
// two ranks that compute 150 to 470 ms on two cores: 20 looks take 1.5 to 7 ms of CPU, 2,000 looks 5 to 9 ms; with
// sched_yield instead of naps the thread was hardly given the core again.
constexpr int kLooks = 20;
constexpr std::int64_t kNap = 50'000, kLongNap = 1'000'000, kPatience = 20'000'000;  // ns

}  // namespace

std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

// -- waiting ---------------------------------------------------------------------------------------------------------

bool wait(Operation& operation, double seconds, double nap_s, bool oversubscribed,
          const std::vector<Operation*>& others) {
    using Clock = std::chrono::steady_clock;
    if (std::isnan(seconds) || std::isnan(nap_s)) throw std::invalid_argument("a time to wait that is not a number");
    seconds = std::clamp(seconds, 0.0, kLongest);
    const Wait during(operation);
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
            } else if (oversubscribed) {
                sched_yield();
            } else {
                pause_core();
            }
        }
        if (idle && !napping && !oversubscribed && spins % kSpinsPerLook != 0) continue;
        const auto now = Clock::now();
        if (now >= end) return operation.advance();  // once more: this rank may have had no core since the last look
        if (!idle) moved = now;
        napping = nap_s > 0 && now - moved > kIdleBeforeNap;
    }
}

// -- tasks -----------------------------------------------------------------------------------------------------------

Task::Task(Progress& queue, Parts parts, std::shared_ptr<void> memory)
    : queue_(queue), memory_(std::move(memory)), parts_(std::move(parts)) {}

bool Task::advance() {
    if (!has_ended()) queue_.advance();
    if (!has_ended()) return false;
    if (error_) std::rethrow_exception(error_);
    return true;
}

// Do what can be done now; true if something has been done. The caller has locked the queue.
bool Task::go_on() {
    const std::uint64_t before = progress();
    try {
        if (!now_) {
            if (part_ == 0) t0_ns_ = now_ns();
            now_ = parts_.begin[part_]();
            moved_++;
        }
        const std::uint64_t done = now_->progress();
        const bool over = now_->advance();
        moved_ += now_->progress() - done;
        if (over && part_ + 1 < parts_.begin.size()) {
            part_++;
            now_ = nullptr;
            moved_++;
        } else if (over) {
            end();
        }
    } catch (...) {
        error_ = std::current_exception();
        if (now_) calls_ = now_->calls();  // now: the next task may be of the same group
        end();
    }
    return progress() != before;
}

void Task::end() {
    t1_ns_ = now_ns();
    moved_++;
    ended_.store(true, std::memory_order_release);
}

std::vector<int> Task::missing() const {
    std::lock_guard<std::mutex> lock(queue_.mutex_);
    return now_ && !has_ended() ? now_->missing() : std::vector<int>{};
}

void Task::begin_wait() { queue_.waiting_++; }

void Task::end_wait() {
    if (--queue_.waiting_ > 0) return;
    bool more;
    {
        std::lock_guard<std::mutex> lock(queue_.mutex_);  // the thread now rests, or sees the change
        more = !queue_.queue_.empty();
    }
    if (more) queue_.wake_.notify_all();
}

// -- the queue -------------------------------------------------------------------------------------------------------

Progress::~Progress() { stop(); }

bool Progress::is_copy() const { return thread_ && process_ != getpid(); }

std::shared_ptr<Task> Progress::add(Parts parts, std::shared_ptr<void> memory) {
    if (is_copy()) throw std::runtime_error("a process that was forked cannot communicate: only its parent can");
    std::shared_ptr<Task> task(new Task(*this, std::move(parts), std::move(memory)));
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stopping_) throw std::runtime_error("this communicator is closed: its run has ended");
        if (!thread_) {
            process_ = getpid();
            thread_ = std::make_unique<std::thread>([this] { run(); });
        }
        queue_.push_back(task);
    }
    wake_.notify_all();
    return task;
}

bool Progress::stop() {
    if (is_copy()) {
        thread_.release();  // it is not in this process, and the lock may be held for ever
        return false;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    if (thread_ && thread_->joinable()) thread_->join();
    return std::any_of(queue_.begin(), queue_.end(), [](const auto& task) { return task->parts_.uses_mpi; });
}

void Progress::free_ended() {
    if (is_copy()) return;
    std::deque<std::shared_ptr<Task>> ended;  // their memory is freed when nobody waits for the lock
    std::lock_guard<std::mutex> lock(mutex_);
    ended.swap(ended_);
}

// Let the first task go on; true if something has been done.
bool Progress::advance() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || queue_.empty()) return false;
    const bool moved = queue_.front()->go_on();
    if (queue_.front()->has_ended()) {
        ended_.push_back(std::move(queue_.front()));
        queue_.pop_front();
    }
    return moved;
}

void Progress::run() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the rank, whose sleep they end
    std::int64_t moved = now_ns();
    for (int looks = 0;; looks++) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            const auto may_go_on = [this] { return stopping_ || (!queue_.empty() && waiting_ == 0); };
            if (!may_go_on()) {
                wake_.wait(lock, may_go_on);
                looks = 0;
                moved = now_ns();
            }
            if (stopping_) return;
        }
        if (advance()) {
            looks = 0;
            moved = now_ns();
        } else if (looks >= kLooks) {
            const timespec nap = {0, now_ns() - moved > kPatience ? kLongNap : kNap};
            nanosleep(&nap, nullptr);
        }
    }
}

}  // namespace hpdl
