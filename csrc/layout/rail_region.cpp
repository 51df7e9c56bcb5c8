#include "layout/rail_region.h"

#include <algorithm>

#include "core/error.h"
#include "layout/gpu_rail_chunks.h"
#include "layout/token_sets.h"

namespace moe::layout {

namespace {

/// Least bytes of an area: a small buffer takes rows of other sizes too.
constexpr int64_t kLeastAreaBytes = int64_t{256} << 10;
constexpr int64_t kMostWeightBytes = 8;

int64_t area_bytes(const LargestOperation& largest,
                   const RailRegion& empty,
                   int64_t num_chunk_tokens,
                   int num_ranks) {
  // By rank, ids travel too; by expert there may be more slots than ranks.
  int64_t record_bytes = 0;
  for (const auto arrangement : {RowLayout::kExpertMajor, RowLayout::kRankMajor}) {
    const RailRecord record = RailRecord::make(arrangement,
                                               num_ranks,
                                               largest.num_max_topk,
                                               largest.max_row_bytes,
                                               0,
                                               kMostWeightBytes,
                                               true);
    record_bytes = std::max(record_bytes, record.bytes);
  }
  const int64_t chunk_bytes = RailRecord::kHeaderBytes + num_chunk_tokens * record_bytes;
  const RailReply reply = RailReply::make(empty,
                                          num_chunk_tokens,
                                          largest.num_max_topk,
                                          largest.max_row_bytes,
                                          kMostWeightBytes * largest.num_max_topk,
                                          largest.node_reduction,
                                          kMostWeightBytes);
  const int64_t needed_bytes =
      round_up(std::max(empty.num_max_chunks * chunk_bytes,
                        reply.replies_offset +
                            std::min(empty.num_max_chunks, kNumReplyPlaces) * reply.window_bytes()),
               64);
  return std::max(needed_bytes, kLeastAreaBytes);
}

}  // namespace

RailRegion rail_region(const LargestOperation& largest,
                       NodeLayout nodes,
                       int num_experts,
                       int depth) {
  MOE_CHECK(largest.num_max_topk > 0 && largest.max_row_bytes > 0 && largest.num_max_tokens >= 0,
            "memory between nodes is made with the buffer: across nodes EpConfig has to say "
            "num_topk, hidden, dtype and num_max_tokens_per_rank, got ",
            largest.num_max_topk,
            " choices per token, rows of ",
            largest.max_row_bytes,
            " bytes (0 for unknown) and ",
            largest.num_max_tokens,
            " tokens (-1 for unknown)");
  const int64_t num_chunk_tokens = rail_tokens_per_chunk(largest.num_max_tokens);
  const int64_t num_max_chunks =
      std::max<int64_t>((largest.num_max_tokens + num_chunk_tokens - 1) / num_chunk_tokens, 1);
  const int64_t set_bytes = most_set_bytes(
      nodes.num_ranks, largest.num_max_shared, largest.num_max_tokens, largest.num_max_topk);
  const auto make = [&](int64_t bytes_each) {
    return RailRegion::make(nodes.num_nodes(),
                            nodes.num_ranks,
                            num_experts,
                            depth,
                            num_max_chunks,
                            bytes_each,
                            set_bytes);
  };
  return make(area_bytes(largest, make(0), num_chunk_tokens, nodes.num_ranks));
}

}  // namespace moe::layout
