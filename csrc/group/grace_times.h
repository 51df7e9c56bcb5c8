#pragma once

#include <cstdint>

// Times that a waiter allows a rank that is late, dead or gone, beside the limits that the user
// sets (moe_comm/peers/peer_timeouts.py).

namespace moe::group {

/// Bounds how late a sleeper looks at its limits.
constexpr int64_t kSleepSliceNs = 40'000'000;

/// A rank may die after its part of an operation that the others can complete. One that has not
/// entered by then has seen the death as well, and will not.
constexpr int64_t kDeathGraceNs = 300'000'000;

/// Time for what a rank of another node sent before it left or died to come and to be handed on
/// there, and for the reason why a rail failed.
constexpr int64_t kRemoteGraceNs = 2'000'000'000;

/// A rank that leaves its operations for recover() or shrink() aborts them after so long: a peer
/// that waits for it in one would never learn that it will not come.
constexpr int64_t kAbortPatienceNs = 500'000'000;

/// A rank that is about to be found dead counts against those who go on until it is.
constexpr int64_t kDeathPatienceNs = 1'000'000'000;

/// The service thread of a rank that runs answers at once, where it gets a core.
constexpr int64_t kLeastAnswerNs = 1'000'000'000;

}  // namespace moe::group
