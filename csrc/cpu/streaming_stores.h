#pragma once

#include <cstdint>

// When what is written goes past the caches.

namespace moe::cpu {

/// Way in which a kernel stores: through caches, or past them (non-temporal; pays above their
/// size).
enum class StoreMode { kCached, kStreaming };

inline StoreMode store_mode(bool is_streaming) {
  return is_streaming ? StoreMode::kStreaming : StoreMode::kCached;
}

/// Mode for results: the caller often holds the last one while the next is written.
inline StoreMode store_mode_of_results(int64_t num_bytes, int64_t cache_bytes) {
  return store_mode(num_bytes > cache_bytes / 2);
}

/// Mode for copies.
/// @param num_bytes  Bytes that all who copy at a time go over.
inline StoreMode store_mode_of_copies(int64_t num_bytes, int64_t cache_bytes) {
  return store_mode(num_bytes > cache_bytes);
}

/// Mode for reads of a file: past the caches where a caller does not go over them again at once.
inline StoreMode store_mode_of_reads(int64_t num_bytes) {
  return store_mode(num_bytes > int64_t{4} << 20);
}

}  // namespace moe::cpu
