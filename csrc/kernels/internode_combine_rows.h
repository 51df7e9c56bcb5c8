#pragma once

#include <cstdint>

#include "device/row_copy.h"
#include "kernels/combine_rows.h"
#include "kernels/rail_peers.h"

// How a warp asks other nodes for rows, answers what they ask for, and adds the rows of its tokens.

namespace moe::kernels {

/// A warp's shared memory: [num_slots] addresses of rows, [num_slots] of their weights,
/// [num_nodes] requests of a chunk.
struct CombineWarpShape {
  int64_t weights_offset = 0;
  int64_t counts_offset = 0;
  int64_t bytes = 0;

  MOE_HOST_DEVICE static CombineWarpShape make(const CombineParams& params, const Rails& rails) {
    CombineWarpShape shape;
    shape.weights_offset = int64_t{8} * params.num_slots;
    shape.counts_offset = 2 * shape.weights_offset;
    shape.bytes = round_up(shape.counts_offset + int64_t{4} * rails.map.num_nodes, 128);
    return shape;
  }
};

/// 0 where only weights are pulled.
MOE_HOST_DEVICE inline int64_t combined_row_bytes(const CombineParams& params) {
  return params.hidden == 0 ? 0 : params.hidden * element_bytes(params.dtype);
}

MOE_HOST_DEVICE inline layout::RailReply rail_reply(const CombineParams& params,
                                                    const Rails& rails) {
  const bool is_by_rank = params.arrangement.is_by_rank();
  return layout::RailReply::make(
      rails.map,
      rails.tokens_per_chunk,
      layout::num_slots_per_token(
          params.arrangement.layout, params.num_recv_topk, params.buffer.num_ranks),
      combined_row_bytes(params),
      int64_t{params.pulled_bytes} * (is_by_rank ? params.num_recv_topk : 1));
}

/// Which chunks a warp asks for and adds, and which places replies to them have. Warps use as many
/// places as there are, each the same number; a place is asked for again once its rows were added.
struct ReplyTurns {
  int64_t num_units = 0;  ///< warps that ask and add
  int64_t num_ahead = 0;  ///< places of each
  int64_t first_chunk = 0;

  MOE_DEVICE static ReplyTurns make(const layout::RailReply& reply) {
    const int64_t num_warps = static_cast<int64_t>(device::num_blocks()) * device::num_warps();
    ReplyTurns turns;
    turns.num_units = num_warps < reply.num_windows ? num_warps : reply.num_windows;
    turns.num_ahead = turns.num_units > 0 ? reply.num_windows / turns.num_units : 0;
    turns.first_chunk =
        static_cast<int64_t>(device::warp_idx()) * device::num_blocks() + device::block_idx();
    return turns;
  }
  MOE_DEVICE int64_t chunk(int64_t turn) const { return first_chunk + turn * num_units; }
  MOE_DEVICE int64_t place(int64_t chunk_idx) const { return chunk_idx % (num_units * num_ahead); }
};

/// The rows of one rank's tokens where they lie: on this node where their owners offer them, else
/// where replies come. All lanes of a warp call.
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
    counts_ = reinterpret_cast<int32_t*>(shared + shape.counts_offset);
  }

  MOE_DEVICE void begin_chunk() const {
    device::sync_warp();
    for (int i = device::lane_idx(); i < rails_.map.num_nodes; i += device::kWarpSize)
      device::store(counts_ + i, int32_t{0});
    device::sync_warp();
  }
  /// Slots of a node so far in this chunk.
  MOE_DEVICE int32_t count(int node_idx) const { return device::load(counts_ + node_idx); }

  /// Counts the slots of a token, in order: requests and sums walk alike.
  /// @param use  use(i, slot, node_idx, idx) on the lane that has slot i: the idx-th of its node in
  ///   the chunk. Not called for no slot.
  template <typename Use>
  MOE_DEVICE void walk(int64_t token_idx, const Use& use) const {
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
      const int32_t before = has_row ? device::load(counts_ + node_idx) : 0;
      device::sync_warp();
      if (has_row && below == 0)
        device::store(counts_ + node_idx, before + device::population(alike));
      if (has_row)
        use(i, slot, node_idx, before + device::population(below));
      device::sync_warp();
    }
  }

  /// Finds addresses of a token's rows and weights. @param place  of the chunk's replies
  MOE_DEVICE void find(int64_t token_idx, int64_t place) const {
    for (int i = device::lane_idx(); i < params_.num_slots; i += device::kWarpSize) {
      device::store(rows_ + i, uint64_t{0});
      device::store(weights_ + i, uint64_t{0});
    }
    device::sync_warp();
    walk(token_idx, [&](int i, int64_t slot, int node_idx, int32_t idx) {
      if (node_idx == rail_.own_node()) {
        device::store(rows_ + i, reinterpret_cast<uint64_t>(local_row(slot)));
        device::store(weights_ + i, reinterpret_cast<uint64_t>(local_weights(slot)));
        return;
      }
      if (MOE_MUTANT(reply_of_next_slot))
        ++idx;
      const std::byte* const record =
          rail_.at(rails_.map.area_in(rail_.own_node(), node_idx) + reply_.replies_offset +
                   place * reply_.window_bytes() + idx * reply_.reply_bytes);
      device::store(rows_ + i, reinterpret_cast<uint64_t>(record));
      device::store(weights_ + i, reinterpret_cast<uint64_t>(record + reply_.weights_offset));
    });
  }

  /// Of slot @p i of the token that was found; null for none.
  MOE_DEVICE const std::byte* row(int i) const {
    return reinterpret_cast<const std::byte*>(device::load(rows_ + i));
  }
  MOE_DEVICE const std::byte* weights(int i) const {
    return reinterpret_cast<const std::byte*>(device::load(weights_ + i));
  }

  /// Where the owner, a rank of this node, offers a row.
  MOE_DEVICE const std::byte* local_row(int64_t slot) const {
    const Peer& peer = params_.tables.peers[layout::Slot::rank_idx(slot)];
    return offset_ptr(device::load_constant(&peer.rows), layout::Slot::row_idx(slot), row_bytes_);
  }
  MOE_DEVICE const std::byte* local_weights(int64_t slot) const {
    const Peer& peer = params_.tables.peers[layout::Slot::rank_idx(slot)];
    return offset_ptr(device::load_constant(&peer.weights),
                      layout::Slot::row_idx(slot),
                      params_.pulled_bytes * weights_per_row());
  }
  MOE_DEVICE int64_t weights_per_row() const {
    return params_.arrangement.is_by_rank() ? params_.num_recv_topk : 1;
  }

 private:
  const CombineParams& params_;
  const Rails& rails_;
  RailMemory rail_;
  const layout::RailReply& reply_;
  int64_t row_bytes_;
  uint64_t* rows_;
  uint64_t* weights_;
  int32_t* counts_;
};

/// Requests and replies. All lanes of a warp call.
class RailRequests {
 public:
  MOE_DEVICE RailRequests(const CombineParams& params,
                          const Rails& rails,
                          const layout::RailReply& reply,
                          const TokenSources& sources)
      : params_(params),
        rails_(rails),
        rail_(params.buffer, rails),
        reply_(reply),
        sources_(sources),
        row_bytes_(combined_row_bytes(params)),
        epoch_(device::load(params.tables.epoch)) {}

  MOE_DEVICE int64_t first_token(int64_t chunk_idx) const {
    return chunk_idx * rails_.tokens_per_chunk;
  }
  MOE_DEVICE int64_t end_token(int64_t chunk_idx) const {
    const int64_t end = first_token(chunk_idx + 1);
    return end < params_.num_tokens ? end : params_.num_tokens;
  }
  /// Of the rail's rank on a node.
  MOE_DEVICE int64_t num_chunks(int src_node) const {
    const layout::Workspace own = workspace(params_.buffer, params_.buffer.rank_idx);
    return rails_.num_chunks(device::load(&own.row(epoch_, rail_.rank_of(src_node)).num_tokens));
  }

  /// Asks every other node for the rows of a chunk, or for none.
  MOE_DEVICE void ask(int64_t chunk_idx, int64_t place) const {
    const int own_node = rail_.own_node();
    sources_.begin_chunk();
    const int64_t offset = chunk_idx * reply_.request_stride;
    for (int64_t token = first_token(chunk_idx); token < end_token(chunk_idx); ++token)
      sources_.walk(token, [&](int, int64_t slot, int node_idx, int32_t idx) {
        if (node_idx != own_node)
          device::store(rail_.at<int64_t>(rails_.map.area_out(own_node, node_idx) + offset +
                                          reply_.request_bytes(idx)),
                        slot);
      });
    for (int i = 0; i < rail_.num_remote_nodes(); ++i) {
      const int node_idx = rail_.remote_node(i);
      if (!rail_.is_active(rail_.rank_of(node_idx)))
        continue;
      const int64_t from = rails_.map.area_out(own_node, node_idx) + offset;
      const int64_t num_slots = sources_.count(node_idx);
      if (device::lane_idx() == 0) {
        device::store(rail_.at<int64_t>(from), num_slots);
        device::store(rail_.at<int64_t>(from) + 1, place);
      }
      rail_.put(node_idx,
                rails_.map.area_in(node_idx, own_node) + offset,
                from,
                reply_.request_bytes(num_slots),
                rails_.map.chunk_signal(node_idx, own_node, chunk_idx),
                epoch_);
    }
    device::sync_warp();
  }

  /// Waits for a request of the rail's rank on @p src_node and answers it. @return false when the
  /// kernel is to leave.
  MOE_DEVICE bool answer(int src_node, int64_t chunk_idx, ProgressShower* progress) const {
    const int own_node = rail_.own_node();
    if (!await(src_node, rails_.map.chunk_signal(own_node, src_node, chunk_idx)))
      return false;
    const auto* const request = rail_.at<const int64_t>(rails_.map.area_in(own_node, src_node) +
                                                        chunk_idx * reply_.request_stride);
    const int64_t num_slots = device::load(request);
    if (num_slots == 0)
      return true;
    const int64_t offset =
        reply_.replies_offset + device::load(request + 1) * reply_.window_bytes();
    const int64_t from = rails_.map.area_out(own_node, src_node) + offset;
    for (int64_t i = 0; i < num_slots; ++i) {
      copy_row(device::load(request + 2 + i), rail_.at(from + i * reply_.reply_bytes));
      progress->tick();
    }
    rail_.put(src_node,
              rails_.map.area_in(src_node, own_node) + offset,
              from,
              num_slots * reply_.reply_bytes,
              rails_.map.reply_signal(src_node, own_node, chunk_idx),
              epoch_);
    device::sync_warp();
    return true;
  }

  /// Waits for the rows of a chunk from every node that has some. @return false when the kernel is
  /// to leave.
  MOE_DEVICE bool await_rows(int64_t chunk_idx) const {
    sources_.begin_chunk();
    for (int64_t token = first_token(chunk_idx); token < end_token(chunk_idx); ++token)
      sources_.walk(token, [](int, int64_t, int, int32_t) {});
    for (int i = 0; i < rail_.num_remote_nodes(); ++i) {
      const int node_idx = rail_.remote_node(i);
      if (sources_.count(node_idx) > 0 && !MOE_MUTANT(no_wait_for_replies) &&
          !await(node_idx, rails_.map.reply_signal(rail_.own_node(), node_idx, chunk_idx)))
        return false;
    }
    return true;
  }

 private:
  MOE_DEVICE bool await(int src_node, int64_t signal) const {
    const WaitSite site{
        layout::Phase::kData, static_cast<int32_t>(layout::Operation::kCombine), epoch_, false};
    return rail_.await(site, src_node, signal, epoch_, params_.buffer.stall_limit_ns);
  }

  MOE_DEVICE void copy_row(int64_t slot, std::byte* to) const {
    if (row_bytes_ > 0)
      copy_bytes(sources_.local_row(slot), to, row_bytes_);
    if (params_.pulled_bytes > 0)
      copy_bytes(sources_.local_weights(slot),
                 to + reply_.weights_offset,
                 params_.pulled_bytes * sources_.weights_per_row());
  }

  static MOE_DEVICE void copy_bytes(const std::byte* from, std::byte* to, int64_t bytes) {
    const int unit =
        device::widest_unit(reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) |
                            static_cast<uint64_t>(bytes));
    device::copy_row(from, bytes, unit, 1, [&](int) { return to; });
  }

  const CombineParams& params_;
  const Rails& rails_;
  RailMemory rail_;
  const layout::RailReply& reply_;
  const TokenSources& sources_;
  int64_t row_bytes_;
  uint64_t epoch_;
};

}  // namespace moe::kernels
