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

/// Of the result of an operation: the caller often holds the last one while the next is written.
inline StoreMode store_mode_of_results(int64_t num_bytes, int64_t cache_bytes) {
  return store_mode(num_bytes > cache_bytes / 2);
}

/// Of copies.
/// @param num_bytes  What all who copy at a time go over.
inline StoreMode store_mode_of_copies(int64_t num_bytes, int64_t cache_bytes) {
  return store_mode(num_bytes > cache_bytes);
}

/// Of what is read from a file: past what a caller goes over again at once.
inline StoreMode store_mode_of_reads(int64_t num_bytes) {
  return store_mode(num_bytes > int64_t{4} << 20);
}

}  // namespace moe::cpu
