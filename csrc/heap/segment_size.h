#pragma once

#include <cstdint>

// Sizes of the segments that a heap takes from the system as it grows.

namespace moe::heap {

/// Bytes of a new segment beyond the window that asks for it: few, as its pages are resident, but
/// enough where a window outgrew its former place, or needs that creep upwards would each grow the
/// heap.
inline uint64_t headroom_bytes(uint64_t window_bytes, uint64_t largest_free_bytes) {
  return largest_free_bytes >= window_bytes / 2 ? window_bytes / 8 : window_bytes / 64;
}

/// Bytes to take at a time for memory that is to be shared: few segments, and little that is there
/// twice, as private pages go as soon as they are shared.
inline constexpr uint64_t kShareStepBytes = uint64_t{256} << 20;

/// The n-th segment on a device adds an n-th of this to the heap at least. However sizes go,
/// segments stay fewer than kernels address: this makes 220 of them for the largest device.
inline constexpr uint64_t kDeviceGrowthDivisor = 2048;

}  // namespace moe::heap
