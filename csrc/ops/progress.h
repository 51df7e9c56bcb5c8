#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "group/group.h"

namespace moe::ops {

/// An operation that may still run: its outcome, or what ended it.
template <typename Outcome>
class Pending {
 public:
  bool is_complete() const { return is_complete_.load(std::memory_order_acquire); }

  /// Null while it runs, and where it ended by an exception.
  const Outcome* outcome() const { return is_complete() && outcome_ ? &*outcome_ : nullptr; }

  /// Blocks until the end, whatever that is.
  void await(const group::InterruptCheck& interrupt_check) {
    if (is_complete())
      return;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!end_.wait_for(lock, std::chrono::milliseconds(50), [this] { return is_complete(); })) {
      lock.unlock();
      if (interrupt_check)
        interrupt_check();
      lock.lock();
    }
  }

  /// Blocks until the end; rethrows what ended it, the same every time.
  const Outcome& wait(const group::InterruptCheck& interrupt_check) {
    await(interrupt_check);
    if (error_)
      std::rethrow_exception(error_);
    return *outcome_;
  }

  void run(const std::function<Outcome()>& body) {
    std::optional<Outcome> outcome;
    std::exception_ptr error;
    try {
      outcome.emplace(body());
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    outcome_ = std::move(outcome);
    error_ = error;
    is_complete_.store(true, std::memory_order_release);
    end_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable end_;
  std::atomic<bool> is_complete_ = false;  ///< whether what is below it changes no more
  std::optional<Outcome> outcome_;
  std::exception_ptr error_;
};

/// Runs a buffer's asynchronous operations, in the order they were issued. Started on first use.
class ProgressThread {
 public:
  /// @param num_max_queued  submit() waits while so many are in flight.
  explicit ProgressThread(size_t num_max_queued) : num_max_queued_(num_max_queued) {}
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  void submit(std::function<void()> task, const group::InterruptCheck& interrupt_check);
  bool is_idle() const;
  bool is_current_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

  /// Waits until every task submitted so far has ended; @return false after @p limit_ns.
  bool wait_idle(const group::InterruptCheck& interrupt_check, int64_t limit_ns = INT64_MAX);

  /// Ends after the tasks already submitted. Idempotent.
  void stop();

 private:
  void work();

  size_t num_max_queued_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool is_running_task_ = false;
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace moe::ops
