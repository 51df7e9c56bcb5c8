#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simt/memory.h"

// Plain accesses of emulated threads, which are too many to be calls. The checker of schedules has
// a file of this name in front of this one, and every access there is a call.

namespace moe::simt::memory {

template <size_t kBytes>
void check_aligned(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % kBytes != 0) [[unlikely]]
    throw_misaligned(address, kBytes);
}

template <size_t kBytes>
void load_plain(const void* from, void* value) {
  check_aligned<kBytes>(from);
  std::memcpy(value, from, kBytes);
}

template <size_t kBytes>
void load_constant_plain(const void* from, void* value) {
  load_plain<kBytes>(from, value);
}

template <size_t kBytes>
void store_plain(void* to, const void* value) {
  check_aligned<kBytes>(to);
  std::memcpy(to, value, kBytes);
}

}  // namespace moe::simt::memory
