#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace moe::cpu {

/// Bytes of a loop from which on threads share it. To start one, or to tell one that sleeps, takes
/// up to 30 us of the caller's time in a virtual machine, where it copies 4 MiB in 400 us.
inline constexpr int64_t kBytesWorthAThread = int64_t{4} << 20;

/// Threads that split one loop between them. One caller at a time.
class ThreadPool {
 public:
  /// @param num_threads  Threads that work, the caller included; workers start on first use.
  explicit ThreadPool(int num_threads) : num_threads_(num_threads) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Runs @p body(begin, end) over [0, count) in contiguous parts and returns when all have ended;
  /// in the calling thread alone when @p count < 2 or the pool has one thread. A thread takes the
  /// next part whenever it has none: the caller waits for parts that were begun, never for a thread
  /// that has yet to wake. @p body must not throw.
  void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body);

 private:
  void start();
  void work();
  /// Runs parts until none is left. @p lock is held before and after.
  void run_parts(std::unique_lock<std::mutex>& lock);

  int num_threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable end_;
  bool is_stopping_ = false;
  int64_t count_ = 0;
  int64_t num_parts_ = 0;
  int64_t next_part_ = 0;
  int num_running_ = 0;  ///< parts
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
};

}  // namespace moe::cpu
