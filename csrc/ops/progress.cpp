#include "ops/progress.h"

#include <chrono>

#include "core/process.h"

namespace moe::ops {

ProgressThread::~ProgressThread() {
  stop();
}

bool ProgressThread::is_idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !is_running_task_;
}

bool ProgressThread::wait_idle(const group::InterruptCheck& interrupt_check, int64_t limit_ns) {
  const int64_t start_ns = sync::now_ns();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_idle = [this] { return tasks_.empty() && !is_running_task_; };
  while (!changed_.wait_for(lock, std::chrono::milliseconds(50), is_idle)) {
    if (sync::now_ns() - start_ns > limit_ns)
      return false;
    lock.unlock();
    if (interrupt_check)
      interrupt_check();
    lock.lock();
  }
  return true;
}

void ProgressThread::submit(std::function<void()> task,
                            const group::InterruptCheck& interrupt_check) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_room = [this] { return tasks_.size() + is_running_task_ < num_max_queued_; };
  while (!changed_.wait_for(lock, std::chrono::milliseconds(50), has_room)) {
    lock.unlock();
    if (interrupt_check)
      interrupt_check();
    lock.lock();
  }
  if (!thread_.joinable())
    thread_ = start_quiet_thread("runs operations that are in flight", [this] { work(); });
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

void ProgressThread::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable())
    thread_.join();
}

void ProgressThread::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_stopping_ || !tasks_.empty(); });
    if (tasks_.empty())
      return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    is_running_task_ = true;
    lock.unlock();
    task();
    task = nullptr;  // what it kept alive goes before the buffer counts as idle
    lock.lock();
    is_running_task_ = false;
    changed_.notify_all();
  }
}

}  // namespace moe::ops
