#include <sched.h>
#include <time.h>

#include <cstring>

#include "core/sync.h"
#include "schedules/host_threads.h"

// core/sync_words.h and core/sync.h of the checker. Outside of checked threads every function is
// the plain operation.

namespace moe::sync {

using simt::checker::HostMemory;
using simt::checker::HostThreads;

namespace checked {

namespace {

/// The threads that a word or byte concerns, or null.
HostThreads* threads_for(const void* address) {
  HostThreads* const threads = HostThreads::current();
  return threads != nullptr && threads->memory().is_shared(address) ? threads : nullptr;
}

uint64_t raw(const void* word, size_t bytes) {
  return HostMemory::latest(word, bytes);
}

}  // namespace

uint64_t load(const void* word, size_t bytes, Order order) {
  HostThreads* const threads = threads_for(word);
  if (threads == nullptr || !threads->step())
    return raw(word, bytes);
  return threads->memory().load(threads->thread(), word, bytes, order);
}

void store(void* word, uint64_t value, size_t bytes, Order order) {
  HostThreads* const threads = threads_for(word);
  if (threads == nullptr)
    std::memcpy(word, &value, bytes);
  else if (threads->step())
    threads->memory().store(threads->thread(), word, value, bytes, order);
}

uint64_t add(void* word, uint64_t value, size_t bytes) {
  // Sleepers leave in a destructor, so nothing is thrown here.
  HostThreads* const threads = threads_for(word);
  if (threads != nullptr && threads->step_quietly())
    return threads->memory().add(threads->thread(), word, value, bytes);
  const uint64_t former = raw(word, bytes);
  const uint64_t sum = former + value;
  if (threads == nullptr)
    std::memcpy(word, &sum, bytes);
  return former;
}

bool compare_exchange(void* word, uint64_t expected, uint64_t desired, size_t bytes) {
  HostThreads* const threads = threads_for(word);
  if (threads != nullptr)
    return threads->step() &&
           threads->memory().compare_exchange(threads->thread(), word, expected, desired, bytes);
  if (raw(word, bytes) != expected)
    return false;
  std::memcpy(word, &desired, bytes);
  return true;
}

void fence_seq_cst() {
  if (HostThreads* const threads = HostThreads::current(); threads != nullptr && threads->step())
    threads->memory().fence_seq_cst(threads->thread());
}

void fence_acquire() {
  if (HostThreads* const threads = HostThreads::current(); threads != nullptr && threads->step())
    threads->memory().fence_acquire(threads->thread());
}

void note_read(const void* from, size_t bytes) {
  if (HostThreads* const threads = threads_for(from); threads != nullptr && threads->step(true))
    threads->memory().read(threads->thread(), from, bytes);
}

void note_write(const void* to, size_t bytes) {
  if (HostThreads* const threads = threads_for(to); threads != nullptr && threads->step(true))
    threads->memory().write(threads->thread(), to, bytes, HostMemory::Manner::kPlain);
}

void read_shared(void* to, const void* from, size_t bytes) {
  note_read(from, bytes);
  std::memcpy(to, from, bytes);
}

void pull_shared(void* to, const void* from, size_t bytes) {
  if (HostThreads* const threads = threads_for(from); threads != nullptr && threads->step(true))
    threads->memory().pull(threads->thread(), from, bytes);
  std::memcpy(to, from, bytes);
}

void confirm_pulls() {
  if (HostThreads* const threads = HostThreads::current(); threads && threads->is_touching())
    threads->memory().confirm_pulls(threads->thread());
}

void drop_pulls() {
  if (HostThreads* const threads = HostThreads::current(); threads && threads->is_touching())
    threads->memory().drop_pulls(threads->thread());
}

void write_shared(void* to, const void* from, size_t bytes) {
  HostThreads* const threads = threads_for(to);
  if (threads != nullptr) {
    if (!threads->step(true))
      return;  // the dead write nothing
    threads->memory().write(threads->thread(), to, bytes, HostMemory::Manner::kPlain);
  }
  std::memcpy(to, from, bytes);
}

void fill_shared(void* to, int value, size_t bytes) {
  HostThreads* const threads = threads_for(to);
  if (threads != nullptr) {
    if (!threads->step(true))
      return;
    threads->memory().write(threads->thread(), to, bytes, HostMemory::Manner::kPlain);
  }
  std::memset(to, value, bytes);
}

void note_exclusive(const void* object) {
  if (HostThreads* const threads = HostThreads::current(); threads && threads->step_quietly())
    threads->memory().note_exclusive(threads->thread(), object);
}

Mutex::~Mutex() {
  if (HostThreads* const threads = HostThreads::current())
    threads->forget(this);
}

void Mutex::lock() {
  if (HostThreads* const threads = HostThreads::current())
    threads->lock(this, &is_held_);
}

void Mutex::unlock() {
  if (HostThreads* const threads = HostThreads::current())
    threads->unlock(this, &is_held_);
}

}  // namespace checked

void yield() {
  if (HostThreads* const threads = HostThreads::current())
    threads->spin();
  else
    sched_yield();
}

void sleep_ns(int64_t duration_ns) {
  if (HostThreads* const threads = HostThreads::current()) {
    if (threads->step())
      threads->sleep(nullptr, threads->time_ns() + duration_ns, true, "time to pass");
    return;
  }
  const timespec duration{static_cast<time_t>(duration_ns / 1'000'000'000),
                          static_cast<long>(duration_ns % 1'000'000'000)};
  nanosleep(&duration, nullptr);
}

uint32_t current_core() {
  HostThreads* const threads = HostThreads::current();
  return threads == nullptr ? static_cast<uint32_t>(sched_getcpu()) : threads->random().below(2);
}

int64_t now_ns() {
  if (HostThreads* const threads = HostThreads::current())
    return threads->time_ns();
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void futex_wait(uint32_t& word, uint32_t expected, int64_t timeout_ns) {
  HostThreads* const threads = HostThreads::current();
  // The kernel compares and sleeps in one.
  if (threads == nullptr || !threads->step() || HostMemory::latest(&word, sizeof(word)) != expected)
    return;
  threads->sleep(&word, threads->time_ns() + timeout_ns, false, "a ring of its doorbell");
}

void futex_wake_all(uint32_t& word) {
  if (HostThreads* const threads = HostThreads::current(); threads != nullptr && threads->step())
    threads->wake_all(&word);
}

}  // namespace moe::sync
