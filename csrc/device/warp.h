#pragma once

#include <cstdint>

#include "device/primitives.h"

// Reductions over the threads of a warp or a block. All threads of it call.
//
// Functions of a block take scratch words in shared memory, one per warp, that nobody else uses
// until the function has returned on every thread; they may be reused at once.

namespace moe::device {

constexpr int kWarpSize = 32;

template <typename T>
MOE_DEVICE T warp_sum(T value) {
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2)
    value += shuffle_xor(value, mask);
  return value;
}

template <typename T>
MOE_DEVICE T warp_max(T value) {
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    const T other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

/// Sum of this lane's value and those of lower lanes.
template <typename T>
MOE_DEVICE T warp_inclusive_sum(T value) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const T below = shuffle_up(value, distance);
    if (lane_idx() >= distance)
      value += below;
  }
  return value;
}

template <typename T>
struct BlockSum {
  T before;  ///< sum of the values of threads before this one
  T total;   ///< sum of all
};

template <typename T>
MOE_DEVICE_CALLED BlockSum<T> block_exclusive_sum(T value, T* scratch) {
  const T inclusive = warp_inclusive_sum(value);
  if (lane_idx() == kWarpSize - 1)
    store(scratch + warp_idx(), inclusive);
  sync_block();
  T before = 0;
  T all_warps = 0;
#pragma unroll 1
  for (int warp = 0; warp < num_warps(); ++warp) {
    const T warp_total = load(scratch + warp);
    if (warp < warp_idx())
      before += warp_total;
    all_warps += warp_total;
  }
  sync_block();
  return {before + inclusive - value, all_warps};
}

template <typename T>
MOE_DEVICE T block_sum(T value, T* scratch) {
  return block_exclusive_sum(value, scratch).total;
}

template <typename T>
MOE_DEVICE_CALLED T block_max(T value, T* scratch) {
  const T warp_most = warp_max(value);
  if (lane_idx() == 0)
    store(scratch + warp_idx(), warp_most);
  sync_block();
  T most = load(scratch);
#pragma unroll 1
  for (int warp = 1; warp < num_warps(); ++warp) {
    const T other = load(scratch + warp);
    most = other > most ? other : most;
  }
  sync_block();
  return most;
}

MOE_DEVICE bool block_any(bool condition, int32_t* scratch) {
  return block_max<int32_t>(condition ? 1 : 0, scratch) != 0;
}

MOE_DEVICE bool block_all(bool condition, int32_t* scratch) {
  return !block_any(!condition, scratch);
}

}  // namespace moe::device
