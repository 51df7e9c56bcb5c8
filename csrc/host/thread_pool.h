#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace moe::host {

/// Threads that split one loop between them. One caller at a time.
class ThreadPool {
 public:
  /// @param num_threads  Threads that work, the caller included; workers start on first use.
  explicit ThreadPool(int num_threads) : num_threads_(num_threads) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Runs @p body(begin, end) over [0, count) in contiguous parts, one per thread, and returns when
  /// all have ended; in the calling thread alone when @p count < 2 or the pool has one thread.
  /// @p body must not throw.
  void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body);

 private:
  void start();
  void work(int worker_idx);
  void run_part(int part_idx);

  int num_threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable end_;
  uint64_t generation_ = 0;
  int num_busy_ = 0;
  bool is_stopping_ = false;
  int64_t count_ = 0;
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
};

/// Starts a thread that takes no signals, so that the main thread's handlers run in the main
/// thread.
std::thread start_quiet_thread(std::function<void()> body);

}  // namespace moe::host
