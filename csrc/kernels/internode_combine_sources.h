#pragma once

#include <cstdint>

#include "kernels/combine_rows.h"
#include "kernels/rail_peers.h"

// Sources of the sums of a warp's tokens, on this node and on others.

namespace moe::kernels {

/// Returns whether other nodes send sums of a token's rows. Where only weights are pulled there are
/// none.
MOE_HOST_DEVICE inline bool reduces_rows(const CombineParams& params) {
  return params.node_reduction != 0 && params.hidden > 0;
}

/// 0 where only weights are pulled.
MOE_HOST_DEVICE inline int64_t combined_row_bytes(const CombineParams& params) {
  return params.hidden == 0 ? 0 : params.hidden * element_bytes(params.dtype);
}

/// The same on every rank of an operation, whatever weights each applies.
MOE_HOST_DEVICE inline layout::RailReply rail_reply(const CombineParams& params,
                                                    const Rails& rails) {
  const bool is_by_rank = params.arrangement.is_by_rank();
  return layout::RailReply::make(
      rails.map,
      rails.tokens_per_chunk,
      layout::num_slots_per_token(
          params.arrangement.layout, params.num_recv_topk, params.buffer.num_ranks),
      combined_row_bytes(params),
      int64_t{params.pulled_bytes} * (is_by_rank ? params.num_recv_topk : 1),
      reduces_rows(params),
      params.dtype == DType::kFloat64 ? 8 : 4);
}

/// A warp's shared memory, S slots of a token (of any rank), N nodes:
///   [S] addresses of rows; [S] addresses of their weights, or the weights themselves;
///   with node_reduction [N] addresses of sums; [kNumCounts, N] int32 counts of a chunk.
struct CombineWarpShape {
  static constexpr int kNumCounts = 5;

  int64_t weights_offset = 0;
  int64_t sums_offset = 0;
  int64_t counts_offset = 0;
  int64_t bytes = 0;

  MOE_HOST_DEVICE static CombineWarpShape make(const CombineParams& params, const Rails& rails) {
    const int64_t num_nodes = rails.map.num_nodes;
    CombineWarpShape shape;
    shape.weights_offset = 8 * rail_reply(params, rails).num_slots;
    shape.sums_offset = 2 * shape.weights_offset;
    shape.counts_offset = shape.sums_offset + (reduces_rows(params) ? 8 * num_nodes : 0);
    shape.bytes = round_up(shape.counts_offset + 4 * kNumCounts * num_nodes, 128);
    return shape;
  }
};

/// The rows of one rank's tokens where they lie: on this node where their owners offer them, else
/// where replies come. All lanes of a warp call.
/// @tparam kReduces  another node sends one row for a token, the sum of those there
template <bool kReduces>
class TokenSources {
 public:
  MOE_DEVICE TokenSources(const CombineParams& params,
                          const Rails& rails,
                          const layout::RailReply& reply,
                          std::byte* shared)
      : params_(params),
        rails_(rails),
        rail_(params.buffer, rails),
        reply_(reply),
        row_bytes_(combined_row_bytes(params)) {
    const CombineWarpShape shape = CombineWarpShape::make(params, rails);
    rows_ = reinterpret_cast<uint64_t*>(shared);
    weights_ = reinterpret_cast<uint64_t*>(shared + shape.weights_offset);
    sums_ = reinterpret_cast<uint64_t*>(shared + shape.sums_offset);
    counts_ = reinterpret_cast<int32_t*>(shared + shape.counts_offset);
  }

  MOE_DEVICE void begin_chunk() const {
    device::sync_warp();
#pragma unroll 1
    for (int i = device::lane_idx(); i < rails_.map.num_nodes; i += device::kWarpSize) {
      device::store(count_place(kSlots, i), int32_t{0});
      if constexpr (kReduces) {
        device::store(count_place(kRows, i), int32_t{0});
        device::store(count_place(kLastToken, i), int32_t{-1});
      }
    }
    device::sync_warp();
  }
  /// Slots of a node so far in this chunk.
  MOE_DEVICE int32_t num_slots(int node_idx) const {
    return device::load_shared(count_place(kSlots, node_idx));
  }
  /// Rows that a node sends for them.
  MOE_DEVICE int32_t num_rows(int node_idx) const {
    return device::load_shared(count_place(kReduces ? kRows : kSlots, node_idx));
  }

  /// A slot of the token that walk() is at, on the lane that has it.
  struct Place {
    int slot_idx;
    int64_t slot;
    int node_idx;
    int32_t idx;      ///< among the slots of its node in the chunk
    int32_t row_idx;  ///< index of the row that brings it, among those that the node sends
    bool is_first;    ///< whether it is the first of its token on its node
  };

  /// Counts the slots of a token, in order: requests and sums walk alike.
  /// @param use  use(place); not called for no slot
  template <typename Use>
  MOE_DEVICE void walk(int64_t token_idx, const Use& use) const {
    const auto token = static_cast<int32_t>(token_idx);
#pragma unroll 1
    for (int first = 0; first < params_.num_slots; first += device::kWarpSize) {
      const int i = first + device::lane_idx();
      const int64_t slot =
          i < params_.num_slots
              ? device::load_constant(params_.slots + token_idx * params_.num_slots + i)
              : layout::Slot::kNone;
      const bool has_row = slot != layout::Slot::kNone;
      const int node_idx =
          has_row ? rails_.nodes.node_idx(layout::Slot::rank_idx(slot)) : rails_.map.num_nodes;
      const uint32_t alike = device::match_any(static_cast<uint32_t>(node_idx));
      const uint32_t below = alike & ((uint32_t{1} << device::lane_idx()) - 1);
      const int32_t before = has_row ? num_slots(node_idx) : 0;
      const int32_t rows_before = kReduces && has_row ? num_rows(node_idx) : 0;
      const bool is_new =
          kReduces && has_row && device::load_shared(count_place(kLastToken, node_idx)) != token;
      device::sync_warp();
      if (has_row && below == 0) {
        device::store(count_place(kSlots, node_idx), before + device::population(alike));
        if (is_new) {
          device::store(count_place(kRows, node_idx), rows_before + 1);
          device::store(count_place(kLastToken, node_idx), token);
        }
      }
      if (has_row) {
        const int32_t idx = before + device::population(below);
        use(Place{i,
                  slot,
                  node_idx,
                  idx,
                  kReduces ? rows_before - (is_new ? 0 : 1) : idx,
                  is_new && below == 0});
      }
      device::sync_warp();
    }
  }

  /// Counts a chunk. Behind it total_slots() and total_rows() are those of the chunk, and walking
  /// begins again.
  MOE_DEVICE void count(int64_t first_token, int64_t end_token) const {
    begin_chunk();
#pragma unroll 1
    for (int64_t token_idx = first_token; token_idx < end_token; ++token_idx)
      walk(token_idx, [](const Place&) {});
#pragma unroll 1
    for (int i = device::lane_idx(); i < rails_.map.num_nodes; i += device::kWarpSize) {
      device::store(count_place(kAllSlots, i), num_slots(i));
      device::store(count_place(kAllRows, i), num_rows(i));
    }
    begin_chunk();
  }
  MOE_DEVICE int32_t total_slots(int node_idx) const {
    return device::load_shared(count_place(kAllSlots, node_idx));
  }
  MOE_DEVICE int32_t total_rows(int node_idx) const {
    return device::load_shared(count_place(kAllRows, node_idx));
  }

  /// Finds addresses of a token's rows and weights; its chunk was counted.
  /// @param place  place of the chunk's replies
  MOE_DEVICE void find(int64_t token_idx, int64_t place) const {
#pragma unroll 1
    for (int i = device::lane_idx(); i < params_.num_slots; i += device::kWarpSize) {
      device::store(rows_ + i, uint64_t{0});
      device::store(weights_ + i, uint64_t{0});
    }
#pragma unroll 1
    for (int i = device::lane_idx(); kReduces && i < rails_.map.num_nodes; i += device::kWarpSize)
      device::store(sums_ + i, uint64_t{0});
    device::sync_warp();
    walk(token_idx, [&](const Place& at) {
      if (at.node_idx == rail_.own_node()) {
        device::store(rows_ + at.slot_idx, reinterpret_cast<uint64_t>(local_row(at.slot)));
        device::store(weights_ + at.slot_idx, reinterpret_cast<uint64_t>(local_weights(at.slot)));
        return;
      }
      const std::byte* const reply =
          rail_.at(rails_.map.area_in(rail_.own_node(), at.node_idx) + reply_.replies_offset +
                   place * reply_.window_bytes());
      const auto row = reinterpret_cast<uint64_t>(reply + at.row_idx * reply_.row_stride);
      if constexpr (!kReduces)
        device::store(rows_ + at.slot_idx, row);
      else if (at.is_first)
        device::store(sums_ + at.node_idx, row);
      const int64_t weights_offset = reply_.reply_bytes(total_rows(at.node_idx), at.idx);
      device::store(weights_ + at.slot_idx, reinterpret_cast<uint64_t>(reply + weights_offset));
    });
  }

  // Sources of the token that was found; null for none.

  /// The row of slot @p i; with kReduces, where it lies on this node.
  MOE_DEVICE const std::byte* row(int i) const { return address(rows_ + i); }
  MOE_DEVICE const std::byte* weights(int i) const { return address(weights_ + i); }
  /// Sum that another node sent.
  MOE_DEVICE const std::byte* sum(int node_idx) const { return address(sums_ + node_idx); }

  /// Address at which the owner, a rank of this node, offers a row.
  MOE_DEVICE const std::byte* local_row(int64_t slot) const {
    const Peer& peer = params_.tables.peers[layout::Slot::rank_idx(slot)];
    return offset_ptr(device::load_constant(&peer.rows), layout::Slot::row_idx(slot), row_bytes_);
  }
  MOE_DEVICE const std::byte* local_weights(int64_t slot) const {
    const Peer& peer = params_.tables.peers[layout::Slot::rank_idx(slot)];
    return offset_ptr(
        device::load_constant(&peer.weights), layout::Slot::row_idx(slot), reply_.weights_stride);
  }

 private:
  enum Count { kSlots, kRows, kLastToken, kAllSlots, kAllRows };

  MOE_DEVICE int32_t* count_place(Count count, int node_idx) const {
    return counts_ + count * rails_.map.num_nodes + node_idx;
  }
  static MOE_DEVICE const std::byte* address(const uint64_t* place) {
    return reinterpret_cast<const std::byte*>(device::load_shared(place));
  }

  const CombineParams& params_;
  const Rails& rails_;
  RailMemory rail_;
  const layout::RailReply& reply_;
  int64_t row_bytes_;
  uint64_t* rows_;
  uint64_t* weights_;
  uint64_t* sums_;
  int32_t* counts_;
};

}  // namespace moe::kernels
