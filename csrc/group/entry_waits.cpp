#include "group/entry_waits.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace moe::group {

void EntryWait::conclude(const std::string& circle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!verdict_)
    verdict_ = circle;
}

std::optional<std::string> EntryWait::verdict() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return verdict_;
}

std::shared_ptr<CallerThread> CallerThread::of_this_module() {
  static std::atomic<uint64_t> num_threads{0};
  thread_local std::shared_ptr<CallerThread> own;
  thread_local pid_t process_id = 0;
  // A forked child is another caller, and somebody may have held the lock at the fork.
  if (own == nullptr || process_id != ::getpid()) [[unlikely]] {
    own = std::shared_ptr<CallerThread>(new CallerThread(num_threads.fetch_add(1) + 1));
    process_id = ::getpid();
  }
  return own;
}

std::shared_ptr<EntryWait> CallerThread::wait() const {
  std::shared_ptr<EntryTable> table;
  uint64_t buffer_number = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (awaited_table_ == nullptr)
      return wait_;
    table = awaited_table_;
    buffer_number = awaited_buffer_;
  }
  return table->wait_in(buffer_number);
}

void CallerThread::set_wait(std::shared_ptr<EntryWait> wait) {
  const std::lock_guard<std::mutex> lock(mutex_);
  wait_ = std::move(wait);
}

void CallerThread::set_awaited(std::shared_ptr<EntryTable> table, uint64_t buffer_number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  awaited_table_ = std::move(table);
  awaited_buffer_ = buffer_number;
}

std::shared_ptr<CallerThread> EntryTable::this_thread() const {
  return CallerThread::of_this_module();
}

void EntryTable::add_caller() {
  const auto thread = this_thread();
  if (last_caller_.load(std::memory_order_relaxed) == thread->number()) [[likely]]
    return;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(callers_, [](const auto& caller) { return caller.expired(); });
  const bool is_known = std::any_of(callers_.begin(), callers_.end(), [&](const auto& caller) {
    return caller.lock() == thread;
  });
  if (!is_known)
    callers_.push_back(thread);
  last_caller_.store(thread->number(), std::memory_order_relaxed);
}

void EntryTable::enter(uint64_t buffer_number, uint64_t epoch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  entered_[buffer_number] = epoch;
}

void EntryTable::forget(uint64_t buffer_number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  entered_.erase(buffer_number);
}

bool EntryTable::has_entered(uint64_t buffer_number, uint64_t epoch) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entered_.find(buffer_number);
  return found != entered_.end() && found->second >= epoch;
}

void EntryTable::queue(uint64_t buffer_number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_queued_[buffer_number];
}

void EntryTable::unqueue(uint64_t buffer_number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = num_queued_.find(buffer_number);
  if (--found->second == 0)
    num_queued_.erase(found);
}

bool EntryTable::has_queued(uint64_t buffer_number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_queued_.contains(buffer_number);
}

void EntryTable::begin(const std::shared_ptr<EntryWait>& wait) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_.push_back(wait);
  }
  this_thread()->set_wait(wait);
}

void EntryTable::end(const std::shared_ptr<EntryWait>& wait) {
  wait->end();
  this_thread()->set_wait(nullptr);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase(waits_, wait);
}

std::shared_ptr<EntryWait> EntryTable::wait_in(uint64_t buffer_number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& wait : waits_)
    if (wait->buffer_number == buffer_number)
      return wait;
  return nullptr;
}

std::shared_ptr<EntryWait> EntryTable::wait_of_caller() const {
  std::shared_ptr<CallerThread> only;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& caller : callers_) {
      auto thread = caller.lock();
      if (thread == nullptr)
        continue;
      if (only != nullptr)
        return nullptr;
      only = std::move(thread);
    }
  }
  return only == nullptr ? nullptr : only->wait();
}

}  // namespace moe::group
