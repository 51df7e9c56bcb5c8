#include "core/sync.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace moe::sync {

void yield() {
  sched_yield();
}

void sleep_ns(int64_t duration_ns) {
  timespec duration;
  duration.tv_sec = static_cast<time_t>(duration_ns / 1'000'000'000);
  duration.tv_nsec = static_cast<long>(duration_ns % 1'000'000'000);
  nanosleep(&duration, nullptr);
}

uint32_t current_core() {
  return static_cast<uint32_t>(sched_getcpu());
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void futex_wait(uint32_t& word, uint32_t expected, int64_t timeout_ns) {
  timespec timeout;
  timeout.tv_sec = static_cast<time_t>(timeout_ns / 1'000'000'000);
  timeout.tv_nsec = static_cast<long>(timeout_ns % 1'000'000'000);
  // Without FUTEX_PRIVATE_FLAG: the word is shared between processes.
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake_all(uint32_t& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace moe::sync
