#pragma once

#include <cstdint>

// group/wait_policy.h of the checker.

namespace moe::group {

/// Spins and yields of a waiter before it sleeps.
struct WaitLadder {
  int num_spins;
  int num_yields;
};

// Where every step is chosen, a waiter is soon asleep.
inline WaitLadder wait_ladder(bool) {
  return {1, 2};
}
inline WaitLadder wait_ladder_on_core_of_peer(bool) {
  return {0, 1};
}

// Every rank is a fiber of one thread.
inline constexpr bool kRanksHaveThreads = false;

// Wraps in a schedule of a bearable length.
inline constexpr uint32_t kGatherBits = 2;

}  // namespace moe::group
