#pragma once

#include <cstdint>

#include "core/error.h"
#include "core/node_layout.h"
#include "kernels/buffer.h"
#include "layout/rail_region.h"

// Data that kernels of a buffer share whose ranks lie on several nodes. Ranks of other nodes are
// reached by puts alone: their workspaces and windows have no address here.

namespace moe::kernels {

/// Threads of a block: what calls of the engine leave of the registers.
constexpr int kMaxInternodeThreads = 256;
MOE_HOST_DEVICE inline int num_threads_of(int num_threads) {
  return num_threads < kMaxInternodeThreads ? num_threads : kMaxInternodeThreads;
}

/// The nodes of a buffer, and how the ranks of this rank's rail (equal local index, one a node) are
/// reached. Passed by value, beside Buffer.
///
/// Of Buffer, `workspaces` of ranks of other nodes are memory of this rank that nobody else uses;
/// `segment_bases` are looked at for ranks of this node only.
struct Rails {
  NodeLayout nodes;
  const int32_t* pes = nullptr;  ///< device [num_ranks]: what the engine calls every rank
  std::byte* region = nullptr;   ///< this rank's, zeros before the first operation
  layout::RailRegion map;
  /// Tokens whose rows make a chunk; the same on every rank.
  int32_t tokens_per_chunk = 8;

  MOE_HOST_DEVICE int64_t num_chunks(int64_t num_tokens) const {
    return (num_tokens + tokens_per_chunk - 1) / tokens_per_chunk;
  }
};

/// Refuses an operation whose rows do not fit what a rank has for each other node. Host.
inline void check_area(const Rails& rails, const char* operation, int64_t needed_bytes) {
  MOE_CHECK(needed_bytes <= rails.map.area_bytes,
            "rows of this ",
            operation,
            " need ",
            needed_bytes,
            " bytes for each other node, areas have ",
            rails.map.area_bytes);
}

}  // namespace moe::kernels
