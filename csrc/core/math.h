#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace moe {

MOE_HOST_DEVICE constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <typename Byte>
MOE_HOST_DEVICE Byte* offset_ptr(Byte* base, int64_t idx, int64_t stride_bytes) {
  static_assert(sizeof(Byte) == 1);
  return base + static_cast<ptrdiff_t>(idx * stride_bytes);
}

/// FNV-1a over 32-bit words; tells apart what must be equal on every rank, not an attacker's input.
MOE_HOST_DEVICE inline uint64_t hash_words(const int32_t* words, int64_t num_words, uint64_t seed) {
  uint64_t hash = seed ^ 0xCBF29CE484222325ull;
  for (int64_t i = 0; i < num_words; ++i) {
    hash ^= static_cast<uint32_t>(words[i]);
    hash *= 0x100000001B3ull;
  }
  return hash;
}

}  // namespace moe
