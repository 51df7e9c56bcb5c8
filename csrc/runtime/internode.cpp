#include "runtime/internode.h"

#include <algorithm>

#include "core/error.h"
#include "layout/routing.h"

namespace moe::runtime {

namespace {

using layout::RailRecord;
using layout::RailRegion;
using layout::RailReply;

/// Chunks of a combine that may be under way at a time, each by a warp of its own.
constexpr int64_t kNumReplyPlaces = 64;
constexpr int64_t kMostTokensPerChunk = 8;
/// Chunks of a full buffer, at least: a warp takes one at a time.
constexpr int64_t kLeastChunks = 256;

/// Of an area: a small buffer takes rows of other sizes too.
constexpr int64_t kLeastAreaBytes = int64_t{256} << 10;
constexpr int64_t kMostWeightBytes = 8;

int32_t tokens_per_chunk(int64_t num_max_tokens) {
  return static_cast<int32_t>(
      std::clamp<int64_t>(num_max_tokens / kLeastChunks, 1, kMostTokensPerChunk));
}

int64_t area_bytes(const InternodeConfig& config,
                   const RailRegion& empty,
                   int64_t num_chunk_tokens,
                   int num_ranks) {
  // By rank, ids travel too; by expert there may be more slots than ranks.
  int64_t record_bytes = 0;
  for (const auto arrangement : {layout::RowLayout::kExpertMajor, layout::RowLayout::kRankMajor}) {
    const RailRecord record = RailRecord::make(arrangement,
                                               num_ranks,
                                               config.num_max_topk,
                                               config.max_row_bytes,
                                               0,
                                               kMostWeightBytes,
                                               true);
    record_bytes = std::max(record_bytes, record.bytes);
  }
  const int64_t chunk_bytes = RailRecord::kHeaderBytes + num_chunk_tokens * record_bytes;
  const RailReply reply = RailReply::make(empty,
                                          num_chunk_tokens,
                                          config.num_max_topk,
                                          config.max_row_bytes,
                                          kMostWeightBytes * config.num_max_topk,
                                          config.node_reduction,
                                          kMostWeightBytes);
  const int64_t needed_bytes =
      round_up(std::max(empty.num_max_chunks * chunk_bytes,
                        reply.replies_offset +
                            std::min(empty.num_max_chunks, kNumReplyPlaces) * reply.window_bytes()),
               64);
  return std::max(needed_bytes, kLeastAreaBytes);
}

}  // namespace

RailRegion rail_region(const InternodeConfig& config,
                       NodeLayout nodes,
                       int num_experts,
                       int depth) {
  MOE_CHECK(config.num_max_topk > 0 && config.max_row_bytes > 0 && config.num_max_tokens >= 0,
            "memory between nodes is made with the buffer: across nodes EpConfig has to say "
            "num_topk, hidden, dtype and num_max_tokens_per_rank, got ",
            config.num_max_topk,
            " choices per token, rows of ",
            config.max_row_bytes,
            " bytes (0 for unknown) and ",
            config.num_max_tokens,
            " tokens (-1 for unknown)");
  const int64_t num_chunk_tokens = tokens_per_chunk(config.num_max_tokens);
  const int64_t num_max_chunks =
      std::max<int64_t>((config.num_max_tokens + num_chunk_tokens - 1) / num_chunk_tokens, 1);
  const auto make = [&](int64_t bytes_each) {
    return RailRegion::make(
        nodes.num_nodes(), nodes.num_ranks, num_experts, depth, num_max_chunks, bytes_each);
  };
  return make(area_bytes(config, make(0), num_chunk_tokens, nodes.num_ranks));
}

Internode::Internode(host::Group& group,
                     Device& device,
                     const InternodeConfig& config,
                     int num_experts,
                     int depth,
                     const host::InterruptCheck& interrupt_check)
    : kernels_(config.kernels),
      num_max_tokens_(config.num_max_tokens),
      max_row_bytes_(config.max_row_bytes),
      node_reduction_(config.node_reduction) {
  rails_.nodes = group.nodes();
  rails_.map = rail_region(config, rails_.nodes, num_experts, depth);
  rails_.tokens_per_chunk = tokens_per_chunk(num_max_tokens_);
  const int num_ranks = group.num_ranks();
  region_ = config.regions->allocate(group, rails_.map.bytes, interrupt_check);
  rails_.region = region_.get();
  pes_staging_ = device.allocate_host(4 * int64_t{num_ranks});
  pes_ = device.allocate(4 * int64_t{num_ranks});
  auto* const pes = reinterpret_cast<int32_t*>(pes_staging_.get());
  for (int rank_idx = 0; rank_idx < num_ranks; ++rank_idx)
    pes[rank_idx] = rank_idx;
  rails_.pes = reinterpret_cast<const int32_t*>(pes_.get());
}

void Internode::upload(Stream& stream) const {
  stream.copy(pes_.get(), pes_staging_.get(), 4 * int64_t{rails_.nodes.num_ranks});
}

std::string Internode::find_shortage(int64_t needed_bytes,
                                     int64_t num_tokens,
                                     int64_t row_bytes) const {
  if (needed_bytes <= rails_.map.area_bytes &&
      rails_.num_chunks(num_tokens) <= rails_.map.num_max_chunks)
    return "";
  return concat(num_tokens,
                " tokens with rows of ",
                row_bytes,
                " bytes take ",
                needed_bytes,
                " bytes of the memory between nodes; this buffer was made with ",
                rails_.map.area_bytes,
                ", for ",
                num_max_tokens_,
                " tokens with rows of ",
                max_row_bytes_,
                " bytes, and cannot make more: make one for larger rows");
}

}  // namespace moe::runtime
