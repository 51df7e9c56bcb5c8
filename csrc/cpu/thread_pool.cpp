#include "cpu/thread_pool.h"

#include <algorithm>

#include "core/process.h"
#include "core/sync.h"

namespace moe::cpu {
namespace {

/// So many that the last ones end at about the same time, so few that taking them costs nothing.
constexpr int kPartsOfAThread = 16;
/// Yields of the caller for the last parts of others before it sleeps: about as long as a part
/// takes.
constexpr int kNumYields = 1000;

}  // namespace

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  start_.notify_all();
  for (auto& worker : workers_)
    worker.join();
}

void ThreadPool::start() {
  for (int worker_idx = 1; worker_idx < num_threads_; ++worker_idx)
    workers_.push_back(start_quiet_thread("copies and adds rows", [this] { work(); }));
}

void ThreadPool::parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (count < 2 || num_threads_ < 2) {
    body(0, count);
    return;
  }
  if (workers_.empty())
    start();
  std::unique_lock<std::mutex> lock(mutex_);
  count_ = count;
  num_parts_ = std::min(count, int64_t{num_threads_} * kPartsOfAThread);
  next_part_ = 0;
  body_ = &body;
  lock.unlock();
  start_.notify_all();
  lock.lock();
  run_parts(lock);
  for (int i = 0; i < kNumYields && num_running_ > 0; ++i) {
    lock.unlock();
    sync::yield();
    lock.lock();
  }
  end_.wait(lock, [this] { return num_running_ == 0; });
}

void ThreadPool::run_parts(std::unique_lock<std::mutex>& lock) {
  while (next_part_ < num_parts_) {
    const int64_t part_idx = next_part_++;
    ++num_running_;
    lock.unlock();
    (*body_)(count_* part_idx / num_parts_, count_ * (part_idx + 1) / num_parts_);
    lock.lock();
    --num_running_;
  }
}

void ThreadPool::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return is_stopping_ || next_part_ < num_parts_; });
    if (is_stopping_)
      return;
    run_parts(lock);
    if (num_running_ == 0)
      end_.notify_one();
  }
}

}  // namespace moe::cpu
