#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

#if defined(MOE_SIMT_CHECKED)
#include "core/sync_checked.h"
#endif

namespace moe::sync {

// The vocabulary in which rows, flags and waits are written: load, store, fence, wait, wake. Words
// live in memory shared between processes, so they are plain integers used through these functions
// only; 64-bit words are lock-free on every supported machine. Bytes beside them, which words
// guard, are read and written by the functions that end in `_shared`.
//
// A checked build (MOE_SIMT_CHECKED) hands every call to a checker, which decides what a load sees,
// who runs next and what was not ordered; elsewhere these are the operations themselves.

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

/// Gives the core to another runnable thread.
void yield();

#if defined(MOE_SIMT_CHECKED)

template <typename Word>
Word load_relaxed(const Word& word) {
  return static_cast<Word>(checked::load(&word, sizeof(Word), checked::Order::kRelaxed));
}

template <typename Word>
Word load_acquire(const Word& word) {
  return static_cast<Word>(checked::load(&word, sizeof(Word), checked::Order::kAcquire));
}

template <typename Word>
void store_relaxed(Word& word, Word value) {
  checked::store(&word, static_cast<uint64_t>(value), sizeof(Word), checked::Order::kRelaxed);
}

template <typename Word>
void store_release(Word& word, Word value) {
  checked::store(&word, static_cast<uint64_t>(value), sizeof(Word), checked::Order::kRelease);
}

template <typename Word>
Word fetch_add(Word& word, Word value) {
  return static_cast<Word>(checked::add(&word, static_cast<uint64_t>(value), sizeof(Word)));
}

template <typename Word>
bool compare_exchange(Word& word, Word expected, Word desired) {
  return checked::compare_exchange(
      &word, static_cast<uint64_t>(expected), static_cast<uint64_t>(desired), sizeof(Word));
}

inline void fence_seq_cst() {
  checked::fence_seq_cst();
}

inline void fence_acquire() {
  checked::fence_acquire();
}

inline void pause() {
  yield();
}

using checked::confirm_pulls;
using checked::drop_pulls;
using checked::fill_shared;
using checked::Mutex;
using checked::note_exclusive;
using checked::note_read;
using checked::note_write;
using checked::pull_shared;
using checked::read_shared;
using checked::write_shared;

#else

template <typename Word>
Word load_relaxed(const Word& word) {
  return std::atomic_ref<Word>(const_cast<Word&>(word)).load(std::memory_order_relaxed);
}

template <typename Word>
Word load_acquire(const Word& word) {
  return std::atomic_ref<Word>(const_cast<Word&>(word)).load(std::memory_order_acquire);
}

template <typename Word>
void store_relaxed(Word& word, Word value) {
  std::atomic_ref<Word>(word).store(value, std::memory_order_relaxed);
}

template <typename Word>
void store_release(Word& word, Word value) {
  std::atomic_ref<Word>(word).store(value, std::memory_order_release);
}

template <typename Word>
Word fetch_add(Word& word, Word value) {
  return std::atomic_ref<Word>(word).fetch_add(value, std::memory_order_acq_rel);
}

template <typename Word>
bool compare_exchange(Word& word, Word expected, Word desired) {
  return std::atomic_ref<Word>(word).compare_exchange_strong(
      expected, desired, std::memory_order_acq_rel, std::memory_order_acquire);
}

inline void fence_seq_cst() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

/// What relaxed loads before it have seen counts as acquired after it.
inline void fence_acquire() {
  std::atomic_thread_fence(std::memory_order_acquire);
}

/// Tells the core that this is a spin loop.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

/// Copies bytes of shared memory to private memory.
inline void read_shared(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

/// read_shared() of bytes whose owner may give up and write meanwhile: what was read counts only
/// once confirm_pulls() is reached, which the reader calls when it knows after a fence_acquire()
/// that nobody had given up.
inline void pull_shared(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}
inline void confirm_pulls() {}
inline void drop_pulls() {}

/// Copies private bytes to shared memory.
inline void write_shared(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

inline void fill_shared(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
}

/// Says that shared bytes are read, or written, by other means than these functions.
inline void note_read(const void*, size_t) {}
inline void note_write(void*, size_t) {}

/// Says that the thread changes @p object, which one thread may change at a time.
inline void note_exclusive(const void*) {}

using Mutex = std::mutex;

#endif

/// Copies all of a message but the flag in front of it, in or out of shared memory.
template <size_t kFlagBytes = sizeof(uint64_t), typename Message>
void write_body(Message& shared, const Message& message) {
  write_shared(reinterpret_cast<std::byte*>(&shared) + kFlagBytes,
               reinterpret_cast<const std::byte*>(&message) + kFlagBytes,
               sizeof(Message) - kFlagBytes);
}
template <size_t kFlagBytes = sizeof(uint64_t), typename Message>
void read_body(Message& message, const Message& shared) {
  read_shared(reinterpret_cast<std::byte*>(&message) + kFlagBytes,
              reinterpret_cast<const std::byte*>(&shared) + kFlagBytes,
              sizeof(Message) - kFlagBytes);
}

/// Sleeps; the caller looks again at what it waits for.
void sleep_ns(int64_t duration_ns);

/// The core this thread runs on now.
uint32_t current_core();

/// CLOCK_MONOTONIC: one clock for all processes of a machine.
int64_t now_ns();

/// Sleeps while @p word equals @p expected, at most @p timeout_ns. Works across processes. May
/// return early for no reason.
void futex_wait(uint32_t& word, uint32_t expected, int64_t timeout_ns);

/// Wakes every sleeper on @p word.
void futex_wake_all(uint32_t& word);

/// How sleepers of one rank are woken: a writer stores its flag, then rings; a sleeper enrols,
/// looks at its flag once more, then sleeps until the next ring.
///
/// Byte map (64 bytes): [0, 4) rings, a count; [4, 8) waiters, sleepers enrolled; rest unused.
struct alignas(64) Doorbell {
  uint32_t rings;
  uint32_t waiters;
};
static_assert(sizeof(Doorbell) == 64);

/// Called after the flag was stored. The fence keeps the flag ahead of the look at `waiters`:
/// either the sleeper sees the flag, or this sees the sleeper.
inline void ring(Doorbell& doorbell) {
  fence_seq_cst();
  if (load_relaxed(doorbell.waiters) == 0)
    return;
  fetch_add(doorbell.rings, 1u);
  futex_wake_all(doorbell.rings);
}

/// Counts its thread among the sleepers while it lives.
class Enrolment {
 public:
  explicit Enrolment(Doorbell& doorbell) : doorbell_(doorbell) { fetch_add(doorbell_.waiters, 1u); }
  ~Enrolment() { fetch_add(doorbell_.waiters, ~0u); }
  Enrolment(const Enrolment&) = delete;
  Enrolment& operator=(const Enrolment&) = delete;

 private:
  Doorbell& doorbell_;
};

/// Sleeps until @p ready() holds, a ring, or @p timeout_ns; the caller looks again in any case.
/// @param ready  Whatever it looks at is not missed where its writer rings; it may throw.
template <typename Ready>
void sleep_unless(Doorbell& doorbell, int64_t timeout_ns, Ready&& ready) {
  const Enrolment enrolment(doorbell);
  fence_seq_cst();
  const uint32_t seen = load_acquire(doorbell.rings);
  if (!ready())
    futex_wait(doorbell.rings, seen, timeout_ns);
}

}  // namespace moe::sync
