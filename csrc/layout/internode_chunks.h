#pragma once

#include <algorithm>
#include <cstdint>

// Sizes of the chunks in which rows cross between nodes from one host to another.

namespace moe::layout {

/// Cut of messages between nodes, equal on every rank.
struct InternodeCut {
  static constexpr int64_t kMostChunkBytes = int64_t{1} << 20;
  static constexpr int64_t kLeastChunkBytes = int64_t{64} << 10;
  /// Bytes of a rank, each direction.
  static constexpr int64_t kMostStagedBytes = int64_t{64} << 20;
  static constexpr int64_t kChunksInFlight = 4;  ///< to or from one node

  /// Bytes of a chunk: less where there are many nodes, because each has some in flight.
  static int64_t chunk_bytes(int num_nodes) {
    const int64_t share = kMostStagedBytes / (kChunksInFlight * std::max(num_nodes - 1, 1));
    return std::clamp(share, kLeastChunkBytes, kMostChunkBytes);
  }

  /// Rows of a chunk, at least 1: as many as fit.
  /// @param row_bytes  InternodeRow::bytes()
  static int64_t rows_per_chunk(int64_t row_bytes, int num_nodes) {
    constexpr int64_t kMostPadding = int64_t{5} * 64;
    return std::max<int64_t>((chunk_bytes(num_nodes) - kMostPadding) / row_bytes, 1);
  }
};

}  // namespace moe::layout
