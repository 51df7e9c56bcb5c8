#include "host/thread_pool.h"

#include <pthread.h>
#include <signal.h>

namespace moe::host {

std::thread start_quiet_thread(std::function<void()> body) {
  sigset_t all;
  sigset_t former;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &former);
  std::thread thread(std::move(body));  // inherits the mask
  pthread_sigmask(SIG_SETMASK, &former, nullptr);
  return thread;
}

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
    workers_.push_back(start_quiet_thread([this, worker_idx] { work(worker_idx); }));
}

void ThreadPool::parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (count < 2 || num_threads_ < 2) {
    body(0, count);
    return;
  }
  if (workers_.empty())
    start();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    count_ = count;
    body_ = &body;
    num_busy_ = num_threads_ - 1;
    ++generation_;
  }
  start_.notify_all();
  run_part(0);
  std::unique_lock<std::mutex> lock(mutex_);
  end_.wait(lock, [this] { return num_busy_ == 0; });
}

void ThreadPool::run_part(int part_idx) {
  const int64_t begin = count_ * part_idx / num_threads_;
  const int64_t end = count_ * (part_idx + 1) / num_threads_;
  if (begin < end)
    (*body_)(begin, end);
}

void ThreadPool::work(int worker_idx) {
  uint64_t seen_generation = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return is_stopping_ || generation_ != seen_generation; });
    if (is_stopping_)
      return;
    seen_generation = generation_;
    lock.unlock();
    run_part(worker_idx);
    lock.lock();
    if (--num_busy_ == 0)
      end_.notify_one();
  }
}

}  // namespace moe::host
