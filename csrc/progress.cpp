#include "progress.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace hpdl {

namespace {

// A look at memory that another rank writes, some of these, then naps: the rank computes on the same core. Tried, with
// two ranks that compute 150 to 470 ms on two cores: 20 looks take 1.5 to 7 ms of CPU, 2,000 looks 5 to 9 ms; with
// sched_yield instead of naps the thread was hardly given the core again.
constexpr int kLooks = 20;
constexpr std::int64_t kNap = 50'000, kLongNap = 1'000'000, kPatience = 20'000'000;  // ns

}  // namespace

// -- tasks -----------------------------------------------------------------------------------------------------------

Task::Task(Progress& progress, std::vector<std::unique_ptr<Part>> parts, std::shared_ptr<void> memory)
    : progress_of_(progress), memory_(std::move(memory)), parts_(std::move(parts)) {}

bool Task::advance() {
    if (!has_ended()) progress_of_.advance();
    if (progress_ != moved()) progress_ = moved();
    if (!has_ended()) return false;
    if (error_) std::rethrow_exception(error_);
    return true;
}

// Do what can be done now; true where something has been done. The caller has locked the queue.
bool Task::go_on() {
    const std::uint64_t before = moved();
    try {
        if (!now_) {
            if (part_ == 0) t0_ns_ = now_ns();
            now_ = &parts_[part_]->begin();
            moved_++;
        }
        const std::uint64_t done = now_->progress();
        const bool over = now_->advance();
        moved_ += now_->progress() - done;
        if (over && part_ + 1 < parts_.size()) {
            part_++;
            now_ = nullptr;
            moved_++;
        } else if (over) {
            end();
        }
    } catch (...) {
        error_ = std::current_exception();
        calls_ = parts_[part_]->calls();  // now: the next task may be of the same group
        end();
    }
    return moved() != before;
}

void Task::end() {
    t1_ns_ = now_ns();
    moved_++;
    ended_.store(true, std::memory_order_release);
}

bool Task::uses_mpi() const {
    return std::any_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->uses_mpi(); });
}

std::vector<int> Task::missing() const {
    std::lock_guard<std::mutex> lock(progress_of_.mutex_);
    return now_ && !has_ended() ? parts_[part_]->missing() : std::vector<int>{};
}

// -- the queue -------------------------------------------------------------------------------------------------------

Progress::~Progress() { stop(); }

bool Progress::is_copy() const { return thread_ && process_ != getpid(); }

std::shared_ptr<Task> Progress::add(std::vector<std::unique_ptr<Part>> parts, std::shared_ptr<void> memory) {
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
    return std::any_of(queue_.begin(), queue_.end(), [](const auto& task) { return task->uses_mpi(); });
}

void Progress::forget_ended() {
    if (is_copy()) return;
    std::deque<std::shared_ptr<Task>> ended;  // their memory is freed when nobody waits for the lock
    std::lock_guard<std::mutex> lock(mutex_);
    ended.swap(ended_);
}

// Let the first task go on; true where something has been done.
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
            const auto may_go_on = [this] { return stopping_ || (!queue_.empty() && helpers_ == 0); };
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

// -- waiting ---------------------------------------------------------------------------------------------------------

Progress::Helping::Helping(Progress& progress) : progress_(progress) { progress_.helpers_++; }

Progress::Helping::~Helping() {
    if (--progress_.helpers_ > 0) return;
    bool more;
    {
        std::lock_guard<std::mutex> lock(progress_.mutex_);  // the thread now rests, or sees the change
        more = !progress_.queue_.empty();
    }
    if (more) progress_.wake_.notify_all();
}

bool wait_for(Progress& progress, Task& task, double seconds, double nap_s, bool crowded,
              const std::vector<Operation*>& others) {
    Progress::Helping helping(progress);
    return wait(task, seconds, nap_s, crowded, others);
}

}  // namespace hpdl
