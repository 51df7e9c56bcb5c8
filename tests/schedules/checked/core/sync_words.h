#pragma once

#include <cstddef>
#include <cstdint>

// core/sync_words.h of the checker: every access is a call of it (host_sync.cpp), which decides
// what a load sees and who runs next.

namespace moe::sync::checked {

enum class Order : uint8_t { kRelaxed, kAcquire, kRelease };

// Words of 4 or 8 bytes. Read-modify-writes acquire and release.
uint64_t load(const void* word, size_t bytes, Order order);
void store(void* word, uint64_t value, size_t bytes, Order order);
uint64_t add(void* word, uint64_t value, size_t bytes);
bool compare_exchange(void* word, uint64_t expected, uint64_t desired, size_t bytes);
void fence_seq_cst();
void fence_acquire();

// Plain bytes; the checker looks at the shared side only.
void read_shared(void* to, const void* from, size_t bytes);
void pull_shared(void* to, const void* from, size_t bytes);
void confirm_pulls();
void drop_pulls();
void write_shared(void* to, const void* from, size_t bytes);
void fill_shared(void* to, int value, size_t bytes);
void note_read(const void* from, size_t bytes);
void note_write(const void* to, size_t bytes);
void note_exclusive(const void* object);

/// A lock between threads of one rank. Other threads run while it is held.
class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  ~Mutex();

  void lock();
  void unlock();

 private:
  bool is_held_ = false;
};

}  // namespace moe::sync::checked

namespace moe::sync {

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

void yield();
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

}  // namespace moe::sync
