#pragma once

#include <cstdint>

// Limit on the operations of a device that are under way at a time; of one buffer, its ring's:
// moe_comm/ep/operations_in_flight.py.

namespace moe::ops {

/// Operations of a device that the host has issued and not yet heard, the one that is called among
/// them.
inline constexpr uint64_t kMostUnheard = 32;

}  // namespace moe::ops
