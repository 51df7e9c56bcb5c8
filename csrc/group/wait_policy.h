#pragma once

#include <cstdint>

// Waiting that suits ranks that are threads on cores, and runs of any length. The checker of
// schedules, whose ranks are fibers of one thread and whose runs are short, has a file of this name
// in front of this one.

namespace moe::group {

/// Spins and yields of a waiter before it sleeps.
struct WaitLadder {
  int num_spins;
  int num_yields;
};

/// Short spins when ranks outnumber cores: a spinning waiter may hold the core its peer needs.
/// @param has_core_alone  No peer that is waited for needs the waiter's core.
inline WaitLadder wait_ladder(bool has_core_alone) {
  return has_core_alone ? WaitLadder{600, 500} : WaitLadder{20, 500};
}

/// For a waiter on the very core of the peer it waits for: spinning only delays that peer. Where
/// there are cores to spare it sleeps soon, because the kernel wakes a sleeper on an idle core and
/// leaves yielding threads together for long.
inline WaitLadder wait_ladder_on_core_of_peer(bool has_spare_cores) {
  return has_spare_cores ? WaitLadder{0, 4} : WaitLadder{0, 500};
}

/// True where threads tell ranks apart.
inline constexpr bool kRanksHaveThreads = true;

/// Bits of the number of an exchange between survivors, which wraps.
inline constexpr uint32_t kGatherBits = 20;

}  // namespace moe::group
