#pragma once

#include <cstdint>

#include "cpu/simd_registers.h"

namespace moe::cpu {

/// Lanes of a checksum; see strided_copy.h.
constexpr int kChecksumLanes = 32;
constexpr int64_t kChecksumRoundBytes = 8 * kChecksumLanes;
constexpr uint64_t kChecksumOdd = 0x9E3779B97F4A7C15ull;

/// Takes a word into a lane, or a register of words into as many lanes.
template <typename Lane>
constexpr MOE_FORCE_INLINE Lane absorb(Lane lane, Lane word) {
  lane = (lane ^ word) * kChecksumOdd;
  return lane ^ lane >> 29;
}

}  // namespace moe::cpu
