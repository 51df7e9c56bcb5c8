// Ranks of a KernelWorld that lie on several nodes.

#include <algorithm>
#include <set>

#include "kernels/internode_exchange.h"
#include "layout/token_sets.h"
#include "schedules/kernel_world.h"

namespace moe::simt::checker {

/// Room for the rows of any dispatch here, and for so many places of replies.
int64_t KernelWorld::area_bytes() const {
  const int64_t num_chunks =
      (shape_.num_max_tokens + shape_.tokens_per_chunk - 1) / shape_.tokens_per_chunk;
  const auto record = layout::RailRecord::make(shape_.layout,
                                               shape_.num_ranks,
                                               shape_.num_topk,
                                               shape_.row_bytes(),
                                               shape_.num_scales() * shape_.scale_bytes(),
                                               shape_.with_weights ? 4 : 0,
                                               shape_.is_by_rank());
  layout::RailRegion region;
  region.num_max_chunks = num_chunks;
  const auto reply = layout::RailReply::make(
      region,
      shape_.tokens_per_chunk,
      layout::num_slots_per_token(shape_.layout, shape_.num_topk, shape_.num_ranks),
      shape_.source_row_bytes(),
      int64_t{4} * shape_.num_topk,
      shape_.node_reduction,
      4);
  return std::max(num_chunks * record.chunk_bytes(shape_.tokens_per_chunk),
                  reply.replies_offset + shape_.num_reply_places * reply.window_bytes());
}

void KernelWorld::make_rails() {
  run_.guest().set_nodes(shape_.num_local_ranks);
  const NodeLayout nodes{shape_.num_ranks, shape_.num_local_ranks};
  const auto map = layout::RailRegion::make(
      nodes.num_nodes(),
      shape_.num_ranks,
      shape_.num_experts,
      shape_.depth,
      (shape_.num_max_tokens + shape_.tokens_per_chunk - 1) / shape_.tokens_per_chunk,
      area_bytes(),
      set_bytes());
  std::vector<std::byte*> regions;
  std::vector<int32_t> pes;
  for (int rank_idx = 0; rank_idx < shape_.num_ranks; ++rank_idx) {
    regions.push_back(zeros<std::byte>(rank_idx, Ownership::kHeap, "rail region", map.bytes));
    pes.push_back(rank_idx);
  }
  run_.guest().make_symmetric(regions);
  for (int rank_idx = 0; rank_idx < shape_.num_ranks; ++rank_idx) {
    Rank& own = rank(rank_idx);
    own.rails.nodes = nodes;
    own.rails.pes = put(rank_idx, Ownership::kDevice, "pes", pes);
    own.rails.region = regions[static_cast<size_t>(rank_idx)];
    own.rails.map = map;
    own.rails.tokens_per_chunk = static_cast<int32_t>(shape_.tokens_per_chunk);
  }
}

void KernelWorld::launch_exchange(int rank_idx, const kernels::ExchangeParams& params) {
  if (has_nodes())
    kernels::launch_internode_exchange(
        shape_of(rank_idx, shape_.num_blocks), params, rank(rank_idx).rails);
  else
    kernels::launch_exchange(shape_of(rank_idx, shape_.num_blocks), params);
}

/// tests/schedules/README.md has the formulas.
void KernelWorld::count_puts(int rank_idx,
                             const Step& step,
                             layout::Operation operation,
                             bool pulls_weights,
                             bool is_weighted) {
  if (!has_nodes())
    return;
  using layout::Operation;
  const kernels::Rails& rails = rank(rank_idx).rails;
  const int num_remote = rails.nodes.num_nodes() - 1;
  int64_t row_bytes = sizeof(layout::Row);
  if (operation == Operation::kDispatch)
    row_bytes += int64_t{4} * layout::Row::num_counts(shape_.num_ranks, shape_.num_experts);
  traffic_.put += num_remote * (round_up(row_bytes, 16) - 8);
  if (operation == Operation::kDispatch && set_bytes() > 0) {
    const int64_t num_tokens = step.inputs[static_cast<size_t>(rank_idx)].num_tokens();
    const layout::TokenSetMap sets{shape_.num_ranks,
                                   rank(rank_idx).replicas.num_shared,
                                   layout::TokenSetMap::words_of(num_tokens)};
    traffic_.put += num_remote * static_cast<int64_t>(
                                     sets.bytes(layout::TokenSetMap::most_planes(shape_.num_topk)));
  }
  if (step.status != kernels::OperationStatus::kOk)
    return;
  const ExpectedDispatch& expected = step.dispatched[static_cast<size_t>(rank_idx)];
  const int64_t num_tokens = step.inputs[static_cast<size_t>(rank_idx)].num_tokens();
  int64_t num_records = 0;
  int64_t num_remote_slots = 0;
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx) {
    std::set<int> nodes;
    for (int64_t i = 0; i < expected.num_slots; ++i) {
      const int64_t slot = expected.slots[static_cast<size_t>(token_idx * expected.num_slots + i)];
      if (slot < 0 || rails.nodes.is_same_node(rank_idx, layout::Slot::rank_idx(slot)))
        continue;
      ++num_remote_slots;
      nodes.insert(rails.nodes.node_idx(layout::Slot::rank_idx(slot)));
    }
    num_records += static_cast<int64_t>(nodes.size());
  }
  const int64_t num_headers = num_remote * rails.num_chunks(num_tokens);
  if (operation != Operation::kCombine) {
    const auto record =
        layout::RailRecord::make(shape_.layout,
                                 shape_.num_ranks,
                                 shape_.num_topk,
                                 shape_.row_bytes(),
                                 shape_.num_scales() * shape_.scale_bytes(),
                                 shape_.with_weights ? 4 : 0,
                                 operation == Operation::kDispatch && shape_.is_by_rank());
    traffic_.put += num_headers * layout::RailRecord::kHeaderBytes + num_records * record.bytes;
    return;
  }
  const int64_t weights_per_row = shape_.is_by_rank() ? step.num_recv_topk : 1;
  const int64_t pulled_bytes = pulls_weights ? 4 * weights_per_row : 0;
  const int64_t applied_bytes = shape_.node_reduction && is_weighted ? 4 : 0;
  const int64_t num_rows = shape_.node_reduction ? num_records : num_remote_slots;
  traffic_.put += num_headers * layout::RailReply::kHeaderBytes +
                  num_remote_slots * (8 + applied_bytes + pulled_bytes) +
                  num_rows * round_up(shape_.source_row_bytes(), 16);
}

}  // namespace moe::simt::checker
