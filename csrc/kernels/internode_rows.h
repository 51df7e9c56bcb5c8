#pragma once

#include <cstdint>

#include "kernels/dispatch_rows.h"
#include "kernels/rail_peers.h"

// Chunks of a warp's tokens that it packs for other nodes, and those that came, which it writes to
// slots of its own.

namespace moe::kernels {

/// A warp's shared memory: [num_slots] places of the token's rows on this node, the same number of
/// distinct other nodes and of records there, int64 each; [num_nodes] records in the chunk; scale
/// factors of a row.
struct RailWarpShape {
  int64_t nodes_offset = 0;
  int64_t records_offset = 0;
  int64_t counts_offset = 0;
  int64_t scales_offset = 0;
  int64_t slots_offset = 0;
  int64_t bytes = 0;

  MOE_HOST_DEVICE static RailWarpShape make(const DispatchParams& params, const Rails& rails) {
    const int64_t per_slot = int64_t{8} * params.choices.num_slots;
    RailWarpShape shape;
    shape.nodes_offset = per_slot;
    shape.records_offset = shape.nodes_offset + per_slot;
    shape.slots_offset = shape.records_offset + per_slot;
    shape.counts_offset = shape.slots_offset + per_slot;
    shape.scales_offset = round_up(shape.counts_offset + int64_t{4} * rails.map.num_nodes, 16);
    shape.bytes =
        round_up(shape.scales_offset + int64_t{params.num_scales} * params.scale_bytes, 128);
    return shape;
  }
};

MOE_HOST_DEVICE inline layout::RailRecord rail_record(const DispatchParams& params, int num_topk) {
  return layout::RailRecord::make(params.arrangement.layout,
                                  params.buffer.num_ranks,
                                  num_topk,
                                  params.row_bytes,
                                  int64_t{params.num_scales} * params.scale_bytes,
                                  params.weight_bytes,
                                  params.with_topk_idx != 0);
}

/// Packs the tokens of one rank: a row goes to its slots on this node and into a record for each
/// other node at a time, read once. All lanes of a warp call.
template <typename Source>
class RailPacker {
 public:
  MOE_DEVICE RailPacker(const DispatchParams& params, const Rails& rails, std::byte* shared)
      : params_(params),
        rails_(rails),
        rail_(params.buffer, rails),
        places_(params),
        finder_(params),
        record_(rail_record(params, params.choices.num_topk)),
        epoch_(device::load(params.tables.epoch)) {
    const RailWarpShape shape = RailWarpShape::make(params, rails);
    local_slots_ = reinterpret_cast<int64_t*>(shared);
    nodes_ = reinterpret_cast<int64_t*>(shared + shape.nodes_offset);
    records_ = reinterpret_cast<std::byte**>(shared + shape.records_offset);
    slots_ = reinterpret_cast<int64_t*>(shared + shape.slots_offset);
    counts_ = reinterpret_cast<int32_t*>(shared + shape.counts_offset);
    scales_ = shared + shape.scales_offset;
    source_unit_ = device::widest_unit(reinterpret_cast<uint64_t>(params.x) |
                                       static_cast<uint64_t>(params.source_row_bytes));
    wire_unit_ = device::widest_unit(static_cast<uint64_t>(params.row_bytes));
    RowMetadataWriter(params, scales_).clear_scales();
  }

  /// Moves the tokens of a chunk and puts it to every other node, also where it has none.
  MOE_DEVICE void send(int64_t chunk_idx, ProgressReporter* progress) const {
#pragma unroll 1
    for (int node_idx = device::lane_idx(); node_idx < rails_.map.num_nodes;
         node_idx += device::kWarpSize)
      device::store(counts_ + node_idx, int32_t{0});
    device::sync_warp();
    const int64_t begin = chunk_idx * rails_.tokens_per_chunk;
    int64_t end = begin + rails_.tokens_per_chunk;
    end = end < params_.choices.num_tokens ? end : params_.choices.num_tokens;
#pragma unroll 1
    for (int64_t token_idx = begin; token_idx < end; ++token_idx) {
      if (!finder_.find(token_idx, slots_))
        continue;
      move(token_idx, chunk_idx);
      progress->tick();
      device::sync_warp();
    }
    put_chunk(chunk_idx);
  }

 private:
  MOE_DEVICE int64_t chunk_offset(int64_t chunk_idx) const {
    return chunk_idx * record_.chunk_bytes(rails_.tokens_per_chunk);
  }

  /// Parts the slots of a token by node, and takes a record on each other node.
  /// @return how many other nodes.
  MOE_DEVICE int part(int64_t chunk_idx) const {
    int num_nodes = 0;
#pragma unroll 1
    for (int i = 0; i < params_.choices.num_slots; ++i) {
      const int64_t slot = device::load(slots_ + i);
      const int node_idx = slot == layout::Slot::kNone
                               ? rail_.own_node()
                               : rails_.nodes.node_idx(layout::Slot::rank_idx(slot));
      const bool is_here = node_idx == rail_.own_node();
      if (device::lane_idx() == 0)
        device::store(local_slots_ + i, is_here ? slot : layout::Slot::kNone);
      bool is_known = is_here;
#pragma unroll 1
      for (int j = 0; j < num_nodes && !is_known; ++j)
        is_known = device::load(nodes_ + j) == node_idx;
      if (is_known)
        continue;
      if (device::lane_idx() == 0) {
        const int32_t idx = device::load(counts_ + node_idx);
        device::store(counts_ + node_idx, idx + 1);
        device::store(nodes_ + num_nodes, int64_t{node_idx});
        const int64_t record = rails_.map.area_out(rail_.own_node(), node_idx) +
                               chunk_offset(chunk_idx) + record_.chunk_bytes(idx);
        device::store(reinterpret_cast<uint64_t*>(records_ + num_nodes),
                      reinterpret_cast<uint64_t>(rail_.at(record)));
      }
      ++num_nodes;
      device::sync_warp();
    }
    device::sync_warp();
    return num_nodes;
  }

  MOE_DEVICE std::byte* record(int i) const {
    return reinterpret_cast<std::byte*>(device::load(reinterpret_cast<uint64_t*>(records_ + i)));
  }

  MOE_DEVICE void move(int64_t token_idx, int64_t chunk_idx) const {
    const int num_nodes = part(chunk_idx);
    const int num_slots = params_.choices.num_slots;
    const RowMetadataWriter metadata(params_, scales_);
    const std::byte* const row = offset_ptr(params_.x, token_idx, params_.source_row_bytes);
    const auto place_of = [&](int i) {
      return i < num_slots ? places_.row(device::load(local_slots_ + i)) : record(i - num_slots);
    };
    if constexpr (std::is_same_v<Source, Bytes>) {
      const int unit = source_unit_ < wire_unit_ ? source_unit_ : wire_unit_;
      device::copy_row(row, params_.row_bytes, unit, num_slots + num_nodes, place_of);
      if (params_.num_scales > 0)
        metadata.gather_scales(token_idx);
    } else {
      quantize_piece<Source>(params_.quantize,
                             row,
                             0,
                             params_.row_bytes,
                             source_unit_,
                             scales_,
                             [&](int64_t element, const device::Bytes16& codes, int64_t num_own) {
#pragma unroll 1
                               for (int i = 0; i < num_slots + num_nodes; ++i)
                                 if (std::byte* const place = place_of(i))
                                   store_codes(place + element, codes, num_own, wire_unit_);
                             });
      device::sync_warp();
    }
    if (params_.num_scales > 0)
      metadata.write_scales(
          local_slots_, params_.choices.num_slots, scales_, 0, metadata.scale_row_bytes());
    metadata.write(token_idx, local_slots_);
#pragma unroll 1
    for (int i = 0; i < num_nodes; ++i)
      write_beside(token_idx, static_cast<int>(device::load(nodes_ + i)), record(i));
  }

  /// Writes what travels beside a row to one node.
  MOE_DEVICE void write_beside(int64_t token_idx, int node_idx, std::byte* record) const {
    const int num_topk = params_.choices.num_topk;
    copy_words<uint8_t>(
        record + record_.scales_offset, scales_, int64_t{params_.num_scales} * params_.scale_bytes);
    auto* const slots = reinterpret_cast<int64_t*>(record + record_.slots_offset);
#pragma unroll 1
    for (int i = device::lane_idx(); i < params_.choices.num_slots; i += device::kWarpSize) {
      const int64_t slot = device::load(slots_ + i);
      const bool is_there = slot != layout::Slot::kNone &&
                            rails_.nodes.node_idx(layout::Slot::rank_idx(slot)) == node_idx;
      device::store(slots + i, is_there ? slot : layout::Slot::kNone);
    }
    if (record_.weights_offset > record_.ids_offset)
      copy_words<int64_t>(
          record + record_.ids_offset,
          reinterpret_cast<const std::byte*>(params_.choices.topk_idx + token_idx * num_topk),
          num_topk);
    if (params_.weight_bytes > 0)
      copy_words<uint32_t>(record + record_.weights_offset,
                           params_.weights + token_idx * num_topk * params_.weight_bytes,
                           int64_t{num_topk} * params_.weight_bytes / 4);
  }

  template <typename Word>
  static MOE_DEVICE void copy_words(std::byte* to, const std::byte* from, int64_t num_words) {
    for (int64_t i = device::lane_idx(); i < num_words; i += device::kWarpSize)
      device::store(reinterpret_cast<Word*>(to) + i,
                    device::load(reinterpret_cast<const Word*>(from) + i));
  }

  MOE_DEVICE void put_chunk(int64_t chunk_idx) const {
    const int own_node = rail_.own_node();
#pragma unroll 1
    for (int i = 0; i < rail_.num_remote_nodes(); ++i) {
      const int node_idx = rail_.remote_node(i);
      if (!rail_.is_active(rail_.rank_of(node_idx)))
        continue;
      const int64_t num_records = device::load(counts_ + node_idx);
      const int64_t from = rails_.map.area_out(own_node, node_idx) + chunk_offset(chunk_idx);
      if (device::lane_idx() == 0)
        device::store(rail_.at<int64_t>(from), num_records);
      const int64_t to = rails_.map.area_in(node_idx, own_node) + chunk_offset(chunk_idx);
      rail_.put(node_idx,
                to,
                from,
                record_.chunk_bytes(num_records),
                rails_.map.chunk_signal(node_idx, own_node, chunk_idx),
                epoch_);
    }
    device::sync_warp();
  }

  const DispatchParams& params_;
  const Rails& rails_;
  RailMemory rail_;
  Places places_;
  SlotFinder finder_;
  layout::RailRecord record_;
  uint64_t epoch_;
  int64_t* local_slots_;
  int64_t* nodes_;
  std::byte** records_;
  int64_t* slots_;
  int32_t* counts_;
  std::byte* scales_;
  int source_unit_;
  int wire_unit_;
};

/// Writes chunks that came along the rail to their slots on this node. All lanes of a warp call.
class RailForwarder {
 public:
  MOE_DEVICE RailForwarder(const DispatchParams& params, const Rails& rails)
      : params_(params),
        rails_(rails),
        rail_(params.buffer, rails),
        places_(params),
        epoch_(device::load(params.tables.epoch)) {}

  /// Chunks of the rail's rank on @p src_node.
  MOE_DEVICE int64_t num_chunks(int src_node) const {
    const layout::Workspace own = workspace(params_.buffer, params_.buffer.rank_idx);
    return rails_.num_chunks(device::load(&own.row(epoch_, rail_.rank_of(src_node)).num_tokens));
  }

  /// @return false when the kernel is to leave.
  MOE_DEVICE bool forward(int src_node, int64_t chunk_idx, ProgressReporter* progress) const {
    const Buffer& buffer = params_.buffer;
    const int src_rank = rail_.rank_of(src_node);
    const WaitSite site{
        layout::Phase::kData,
        static_cast<int32_t>(params_.is_cached != 0 ? layout::Operation::kCachedDispatch
                                                    : layout::Operation::kDispatch),
        epoch_,
        false};
    if (!rail_.await(site,
                     src_node,
                     rails_.map.chunk_signal(rail_.own_node(), src_node, chunk_idx),
                     epoch_,
                     buffer.stall_limit_ns))
      return false;
    const int num_columns = layout::Row::num_counts(buffer.num_ranks, buffer.num_experts);
    const int num_topk =
        device::load(params_.tables.counts + int64_t{src_rank} * num_columns + num_columns - 1);
    const layout::RailRecord record = rail_record(params_, num_topk);
    const std::byte* const chunk =
        rail_.at(rails_.map.area_in(rail_.own_node(), src_node) +
                 chunk_idx * record.chunk_bytes(rails_.tokens_per_chunk));
    const auto num_records = device::load(reinterpret_cast<const int64_t*>(chunk));
#pragma unroll 1
    for (int64_t i = 0; i < num_records; ++i) {
      write(record, num_topk, chunk + record.chunk_bytes(i));
      progress->tick();
    }
    return true;
  }

 private:
  MOE_DEVICE void write(const layout::RailRecord& record,
                        int num_topk,
                        const std::byte* from) const {
    const auto* const slots = reinterpret_cast<const int64_t*>(from + record.slots_offset);
    const auto num_slots = static_cast<int>((record.ids_offset - record.slots_offset) / 8);
    device::copy_row(from,
                     params_.row_bytes,
                     device::widest_unit(static_cast<uint64_t>(params_.row_bytes)),
                     num_slots,
                     [&](int i) { return places_.row(device::load(slots + i)); });
    const RowMetadataWriter metadata(params_, nullptr);
    if (params_.num_scales > 0)
      metadata.write_scales(
          slots, num_slots, from + record.scales_offset, 0, metadata.scale_row_bytes());
    metadata.write({slots,
                    num_slots,
                    from + record.weights_offset,
                    reinterpret_cast<const int64_t*>(from + record.ids_offset),
                    num_topk});
  }

  const DispatchParams& params_;
  const Rails& rails_;
  RailMemory rail_;
  Places places_;
  uint64_t epoch_;
};

}  // namespace moe::kernels
