#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

// Single accesses to words and bytes that ranks share, as core/sync.h explains them: the operations
// themselves. The checker of schedules has a file of this name in front of this one.

namespace moe::sync {

// 64-bit words are lock-free on every supported machine.
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

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

/// Makes values that relaxed loads before it have seen count as acquired.
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

}  // namespace moe::sync
