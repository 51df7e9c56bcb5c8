#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

// Memory that a buffer keeps ready for its next operations.

namespace moe::ops {

/// Operations whose largest need is what the next one is guessed to have.
inline constexpr size_t kRecentNeeds = 8;

/// Bytes of a window that is guessed to need @p need: room for routing that differs a little from
/// step to step; what is not needed goes back. Few rows differ by more, of a large window a 64th is
/// plenty.
inline uint64_t guessed_window_bytes(uint64_t need) {
  return need + need / 64 + std::min(need / 8, uint64_t{1} << 20);
}

/// Bytes of buffers of a rail that are not in use.
inline constexpr uint64_t kMostKeptRailBytes = uint64_t{256} << 20;

}  // namespace moe::ops
