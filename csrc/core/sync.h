#pragma once

#include <cstddef>
#include <cstdint>

#include "core/sync_words.h"

namespace moe::sync {

// The vocabulary in which rows, flags and waits are written: load, store, fence, wait, wake. Words
// live in memory shared between processes, so they are plain integers used through these functions
// only. Bytes beside them, which words guard, are read and written by the functions that end in
// `_shared`.
//
// What a single access is stands in core/sync_words.h, and sync.cpp has what the system does. The
// checker of schedules is built with others in their place, which decide what a load sees, who runs
// next and what was not ordered.

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

/// Gives the core to another runnable thread.
void yield();

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

/// Wakes sleepers of one rank: a writer stores its flag, then rings; a sleeper enrols,
/// looks at its flag once more, then sleeps until the next ring.
///
/// Byte map (64 bytes): [0, 4) rings, a count; [4, 8) waiters, sleepers enrolled; rest unused.
struct alignas(64) Doorbell {
  uint32_t rings;
  uint32_t waiters;
};
static_assert(sizeof(Doorbell) == 64);

/// Called after the flag was stored, and then a fence was passed, which serves several flags. It
/// keeps them ahead of the look at `waiters`: either the sleeper sees the flag, or this sees the
/// sleeper.
inline void wake(Doorbell& doorbell) {
  if (load_relaxed(doorbell.waiters) == 0)
    return;
  fetch_add(doorbell.rings, 1u);
  futex_wake_all(doorbell.rings);
}

/// wake() after a single flag was stored.
inline void ring(Doorbell& doorbell) {
  fence_seq_cst();
  wake(doorbell);
}

/// Counts its thread among the sleepers while it lives.
class WaiterScope {
 public:
  explicit WaiterScope(Doorbell& doorbell) : doorbell_(doorbell) {
    fetch_add(doorbell_.waiters, 1u);
  }
  ~WaiterScope() { fetch_add(doorbell_.waiters, ~0u); }
  WaiterScope(const WaiterScope&) = delete;
  WaiterScope& operator=(const WaiterScope&) = delete;

 private:
  Doorbell& doorbell_;
};

/// Sleeps until @p ready() holds, a ring, or @p timeout_ns; the caller looks again in any case.
/// @param ready  Whatever it looks at is not missed where its writer rings; it may throw.
template <typename Ready>
void sleep_unless(Doorbell& doorbell, int64_t timeout_ns, Ready&& ready) {
  const WaiterScope waiter(doorbell);
  fence_seq_cst();
  const uint32_t seen = load_acquire(doorbell.rings);
  if (!ready())
    futex_wait(doorbell.rings, seen, timeout_ns);
}

}  // namespace moe::sync
