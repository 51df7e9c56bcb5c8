#pragma once

#include <cstdint>

// Limits on the operations of one buffer that are under way at a time.

namespace moe::ops {

/// Entries of a buffer's ring, where the configuration names no other number: an operation begins
/// when the one so many before it has ended on every rank.
inline constexpr int kDefaultInFlight = 4;

/// Operations of a device that the host has issued and not yet heard, the one that is called among
/// them.
inline constexpr uint64_t kMostUnheard = 32;

}  // namespace moe::ops
