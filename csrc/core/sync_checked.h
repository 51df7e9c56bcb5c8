#pragma once

#include <cstddef>
#include <cstdint>

// What core/sync.h is in a checked build (MOE_SIMT_CHECKED): calls of the checker, which
// tests/schedules implements. Not included by anything else.

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

/// Above how many bytes rows are stored past the caches.
int64_t cache_bytes(int64_t of_machine);

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
