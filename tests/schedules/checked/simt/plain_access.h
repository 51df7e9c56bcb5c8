#pragma once

#include <cstddef>

#include "simt/memory.h"

// simt/plain_access.h of the checker (checked_memory.cpp).

namespace moe::simt::memory {

// 1, 2, 4, 8 or 16 bytes, naturally aligned.
void load(const void* from, void* value, size_t bytes);
void load_constant(const void* from, void* value, size_t bytes);
void store(void* to, const void* value, size_t bytes);

template <size_t kBytes>
void load_plain(const void* from, void* value) {
  load(from, value, kBytes);
}

template <size_t kBytes>
void load_constant_plain(const void* from, void* value) {
  load_constant(from, value, kBytes);
}

template <size_t kBytes>
void store_plain(void* to, const void* value) {
  store(to, value, kBytes);
}

}  // namespace moe::simt::memory
