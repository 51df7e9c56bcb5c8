#pragma once

#include <cstdint>

#include "core/sync.h"
#include "host/group.h"

namespace moe::host {

/// How long a waiter spins and yields before it sleeps.
struct WaitLadder {
  int num_spins;
  int num_yields;
};

#if defined(MOE_SIMT_CHECKED)

// Where every step is chosen, a waiter is soon asleep.
inline WaitLadder wait_ladder(bool) {
  return {1, 2};
}
inline WaitLadder wait_ladder_on_core_of_peer(bool) {
  return {0, 1};
}

#else

/// Short spins when ranks outnumber cores: a spinning waiter then holds the core its peer needs.
inline WaitLadder wait_ladder(bool has_spare_cores) {
  return has_spare_cores ? WaitLadder{600, 500} : WaitLadder{20, 500};
}

/// For a waiter on the very core of the peer it waits for: spinning only delays that peer. Where
/// there are cores to spare it sleeps soon, because the kernel wakes a sleeper on an idle core and
/// leaves yielding threads together for long.
inline WaitLadder wait_ladder_on_core_of_peer(bool has_spare_cores) {
  return has_spare_cores ? WaitLadder{0, 4} : WaitLadder{0, 500};
}

#endif

constexpr int64_t kSleepSliceNs = 40'000'000;  // bounds how late a sleeper looks at its limits

/// Waits until @p ready() holds: spins, yields, then sleeps on this rank's doorbell.
///
/// @param ready    Looks at the flag, with acquire order. Always looked at before anything else.
/// @param on_slow  Called now and then while waiting; throws to give up (abort, death, limits).
template <typename Ready, typename OnSlow>
void wait_until(Group& group, const WaitLadder& ladder, Ready&& ready, OnSlow&& on_slow) {
  for (int i = 0; i < ladder.num_spins; ++i) {
    if (ready())
      return;
    sync::pause();
  }
  for (int i = 0; i < ladder.num_yields; ++i) {
    if (ready())
      return;
    if (i % 64 == 63)
      on_slow();
    sync::yield();
  }
  while (!ready()) {
    // Aborts and deaths ring as well: a sleeper that looks at them once it is enrolled hears them.
    sync::sleep_unless(group.own_doorbell(), kSleepSliceNs, [&] {
      on_slow();
      return ready();
    });
  }
}

template <typename Ready, typename OnSlow>
void wait_until(Group& group, Ready&& ready, OnSlow&& on_slow) {
  wait_until(group, wait_ladder(group.has_spare_cores()), ready, on_slow);
}

}  // namespace moe::host
