#include "kernels/internode_combine.h"

#include "kernels/internode_combine_rows.h"
#include "kernels/internode_finish.h"

namespace moe::kernels {

namespace {

using device::Bytes16;

struct InternodeCombineParams {
  CombineParams operation;
  Rails rails;
};

MOE_HOST_DEVICE int64_t combine_scratch_bytes(int num_threads) {
  return round_up((num_threads / 32 > 2 ? num_threads / 32 : 2) * int64_t{4}, 128);
}

/// The sums of all nodes of a token that was found, in the order of nodes.
/// @param own  sums of this node, not rounded
template <typename Number, typename Unit>
MOE_DEVICE LaneSums<Number, Unit> add_nodes(const CombineParams& params,
                                            const Rails& rails,
                                            const TokenSources<true>& sources,
                                            const LaneSums<Number, Unit>& own,
                                            int64_t offset,
                                            int num_units) {
  const int own_node = rails.nodes.node_idx(params.buffer.rank_idx);
  LaneSums<Number, Unit> sums;
#pragma unroll 1
  for (int node_idx = 0; node_idx < rails.map.num_nodes; ++node_idx) {
    if (node_idx == own_node) {
      sums.add(own);
      continue;
    }
    const std::byte* const from = sources.sum(node_idx);
    if (from == nullptr)
      continue;
    LaneUnits<Unit> row;
    row.load(from + offset, num_units);
    sums.template add<false>(row, 0);
  }
  return sums;
}

/// Adds the rows of a token that was found: all of them in slot order, or (kReduces) node after
/// node, those of this node in slot order among themselves.
template <typename Number, bool kWeighted, bool kReduces, typename Unit>
MOE_DEVICE void add_rows(const CombineParams& params,
                         const Rails& rails,
                         const TokenSources<kReduces>& sources,
                         int64_t token_idx,
                         int64_t row_bytes) {
  using Scalar = typename Number::Scalar;
  const auto load_weight = [&](int i) {
    if (!kWeighted || params.weights == nullptr)
      return Scalar{1};  // a product with it is the row
    const int64_t choice = token_idx * params.num_topk + i;
    if constexpr (sizeof(Scalar) == 8)
      if (params.weight_bytes == 8)
        return device::load_constant(reinterpret_cast<const double*>(params.weights) + choice);
    return static_cast<Scalar>(
        device::load_constant(reinterpret_cast<const float*>(params.weights) + choice));
  };
  for_pieces<Unit>(row_bytes, [&](int64_t offset, int num_units) {
    LaneSums<Number, Unit> sums;
    for (int slot_idx = 0; slot_idx < params.num_slots; ++slot_idx) {
      const std::byte* const from = sources.row(slot_idx);
      if (from == nullptr)
        continue;
      LaneUnits<Unit> row;
      row.load(from + offset, num_units);
      sums.template add<kWeighted>(row, load_weight(slot_idx));
    }
    if constexpr (kReduces)
      sums = add_nodes<Number>(params, rails, sources, sums, offset, num_units);
    sums.store(params.sums + token_idx * row_bytes + offset, num_units);
  });
}

/// Returns whether every row that the token was found to have, and its sum, is in units of 16
/// bytes.
template <bool kReduces>
MOE_DEVICE bool is_token_aligned(const CombineParams& params,
                                 const Rails& rails,
                                 const TokenSources<kReduces>& sources,
                                 int64_t row_bytes) {
  uint64_t bits = static_cast<uint64_t>(row_bytes) | reinterpret_cast<uint64_t>(params.sums);
#pragma unroll 1
  for (int i = device::lane_idx(); i < params.num_slots; i += device::kWarpSize)
    bits |= reinterpret_cast<uint64_t>(sources.row(i));
#pragma unroll 1
  for (int i = device::lane_idx(); kReduces && i < rails.map.num_nodes; i += device::kWarpSize)
    bits |= reinterpret_cast<uint64_t>(sources.sum(i));
  return is_aligned(bits);
}

/// Weights of the token that was found, as they lie at its rows' owners; 0 where no row went.
template <typename Weight, bool kReduces>
MOE_DEVICE void pull_weights(const CombineParams& params,
                             const TokenSources<kReduces>& sources,
                             int64_t token_idx) {
  using layout::Slot;
#pragma unroll 1
  for (int k = device::lane_idx(); k < params.num_topk; k += device::kWarpSize) {
    const int64_t choice = token_idx * params.num_topk + k;
    int slot_idx = k;
    if (params.arrangement.is_by_rank()) {
      const int64_t expert_idx = device::load_constant(params.topk_idx + choice);
      const int owner =
          expert_idx < 0 ? -1 : device::load_constant(params.buffer.expert_rank + expert_idx);
#pragma unroll 1
      for (slot_idx = 0; slot_idx < params.num_slots; ++slot_idx) {
        const int64_t slot =
            device::load_constant(params.slots + token_idx * params.num_slots + slot_idx);
        if (slot != Slot::kNone && Slot::rank_idx(slot) == owner)
          break;
      }
    }
    Weight weight = 0;
    const std::byte* const from = slot_idx < params.num_slots ? sources.weights(slot_idx) : nullptr;
    if (from != nullptr)
      weight = device::load(reinterpret_cast<const Weight*>(from) +
                            (params.arrangement.is_by_rank() ? k : 0));
    device::store(reinterpret_cast<Weight*>(params.pulled) + choice, weight);
  }
}

template <typename Number, bool kWeighted, bool kReduces>
MOE_DEVICE void add_chunk(const CombineParams& params,
                          const Rails& rails,
                          const TokenSources<kReduces>& sources,
                          const RailRequests<Number, kReduces>& requests,
                          int64_t chunk_idx,
                          int64_t place,
                          ProgressReporter* progress) {
  const int64_t row_bytes = combined_row_bytes(params);
#pragma unroll 1
  for (int64_t token_idx = requests.first_token(chunk_idx);
       token_idx < requests.end_token(chunk_idx);
       ++token_idx) {
    sources.find(token_idx, place);
    if (row_bytes > 0) {
      if (is_token_aligned(params, rails, sources, row_bytes))
        add_rows<Number, kWeighted, kReduces, Bytes16>(
            params, rails, sources, token_idx, row_bytes);
      else
        add_rows<Number, kWeighted, kReduces, typename Number::Bits>(
            params, rails, sources, token_idx, row_bytes);
    }
    if (params.pulled_bytes == 8)
      pull_weights<uint64_t>(params, sources, token_idx);
    else if (params.pulled_bytes == 4)
      pull_weights<uint32_t>(params, sources, token_idx);
    progress->tick();
    device::sync_warp();
  }
}

/// Runs one warp: asks ahead, then in turns answers a chunk of every other node, adds one of
/// its own, and asks for the next. @return false when the kernel is to leave.
template <typename Number, bool kWeighted, bool kReduces>
MOE_DEVICE bool combine_chunks(const CombineParams& params, const Rails& rails, std::byte* shared) {
  const layout::RailReply reply = rail_reply(params, rails);
  const ReplyTurns turns = ReplyTurns::make(reply);
  const RailMemory rail(params.buffer, rails);
  const TokenSources<kReduces> sources(params, rails, reply, shared);
  const RailRequests<Number, kReduces> requests(params, rails, reply, sources, shared);
  ProgressReporter progress(params.buffer);
  const int64_t num_own = rails.num_chunks(params.num_tokens);
  if (turns.first_chunk >= turns.num_units)
    return true;
#pragma unroll 1
  for (int64_t turn = 0; turn < turns.num_ahead && turns.chunk(turn) < num_own; ++turn)
    requests.ask(turns.chunk(turn), turns.place(turns.chunk(turn)));
#pragma unroll 1
  for (int64_t turn = 0;; ++turn) {
    const int64_t chunk_idx = turns.chunk(turn);
    bool has_any = chunk_idx < num_own;
#pragma unroll 1
    for (int i = 0; i < rail.num_remote_nodes(); ++i) {
      const int src_node = rail.remote_node(i);
      if (!rail.is_active(rail.rank_of(src_node)) || chunk_idx >= requests.num_chunks(src_node))
        continue;
      has_any = true;
      if (!requests.answer(src_node, chunk_idx, &progress))
        return false;
    }
    if (!has_any)
      return true;
    if (chunk_idx >= num_own)
      continue;
    if (!requests.await_rows(chunk_idx))
      return false;
    add_chunk<Number, kWeighted>(
        params, rails, sources, requests, chunk_idx, turns.place(chunk_idx), &progress);
    const int64_t next = turns.chunk(turn + turns.num_ahead);
    if (next < num_own)
      requests.ask(next, turns.place(next));
  }
}

// Grid: any number of blocks that can run at a time; a warp takes a chunk of tokens at a time, and
//   answers chunks of the other nodes with the same numbers.
// Protocol: a warp asks for its first chunks before it waits for anything. Then chunk c waits for
//   requests of chunk c, which peers made when they had added an earlier one, and for replies to
//   its own, which peers make when they come to c; so the least chunk that anybody has not added
//   never waits for a later one. A request says which place of an area the reply goes to; a place
//   is named again once its rows were added, which also tells the answerer that its copy was sent.
// Example: 2 nodes of 1 rank, chunks of 1 token, a token with slots [a of node 0, b and c of node
//   1]. Rank 0 asks rank 1 for b and c; rank 1 copies them, side by side, and puts them to rank 0,
//   which adds a, b, c. With kReduces rank 1 puts b + c, rounded, and rank 0 adds a and that.
template <typename Number, bool kWeighted, bool kReduces>
MOE_KERNEL void internode_combine(const InternodeCombineParams both) {
  const CombineParams& params = both.operation;
  const Rails& rails = both.rails;
  if (device::load(params.tables.may_move) == 0)
    return;
  std::byte* const shared = device::shared_memory();
  auto* const scratch = reinterpret_cast<int32_t*>(shared);
  if (!block_has_left(params.buffer, scratch))
    combine_chunks<Number, kWeighted, kReduces>(
        params,
        rails,
        shared + combine_scratch_bytes(device::num_threads()) +
            device::warp_idx() * CombineWarpShape::make(params, rails).bytes);
  internode_finish(params.buffer, params.tables, rails, layout::Operation::kCombine, scratch);
}

template <typename Number>
void launch_internode_combine_of(const device::Launch& launch,
                                 const InternodeCombineParams& params) {
  // Requests of others may have weights where this rank applies none: one kernel for both.
  if (reduces_rows(params.operation))
    device::launch(&internode_combine<Number, true, true>, launch, params);
  else if (params.operation.weights != nullptr)
    device::launch(&internode_combine<Number, true, false>, launch, params);
  else
    device::launch(&internode_combine<Number, false, false>, launch, params);
}

}  // namespace

size_t internode_combine_shared_bytes(const CombineParams& params,
                                      const Rails& rails,
                                      int num_threads) {
  num_threads = num_threads_of(num_threads);
  return static_cast<size_t>(combine_scratch_bytes(num_threads) +
                             num_threads / 32 * CombineWarpShape::make(params, rails).bytes);
}

int64_t internode_combine_bytes(const CombineParams& params, const Rails& rails) {
  const layout::RailReply reply = rail_reply(params, rails);
  return reply.replies_offset + reply.window_bytes();
}

void launch_internode_combine(const device::Launch& launch,
                              const CombineParams& params,
                              const Rails& rails) {
  check_area(rails, "combine", internode_combine_bytes(params, rails));
  const InternodeCombineParams both{params, rails};
  device::Launch shape = launch;
  shape.num_threads = num_threads_of(launch.num_threads);
  switch (params.dtype) {
    case DType::kBFloat16:
      return launch_internode_combine_of<device::BFloat16>(shape, both);
    case DType::kFloat16:
      return launch_internode_combine_of<device::Float16>(shape, both);
    case DType::kFloat32:
    case DType::kBytes:  // no rows, only weights
      return launch_internode_combine_of<device::Float32>(shape, both);
    case DType::kFloat64:
      return launch_internode_combine_of<device::Float64>(shape, both);
  }
}

}  // namespace moe::kernels
