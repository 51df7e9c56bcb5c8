#pragma once

#include <algorithm>
#include <cstdint>

// Sizes of the chunks in which rows cross between nodes on rails of GPUs.

namespace moe::layout {

/// Chunks of a combine that may be under way at a time, each by a warp of its own.
inline constexpr int64_t kNumReplyPlaces = 64;

/// Tokens of a chunk: few enough that a full buffer has 256 chunks, of which a warp takes one at a
/// time, and no more than 8.
inline int32_t rail_tokens_per_chunk(int64_t num_max_tokens) {
  return static_cast<int32_t>(std::clamp<int64_t>(num_max_tokens / 256, 1, 8));
}

}  // namespace moe::layout
