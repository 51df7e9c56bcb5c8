#pragma once

#include <cstdint>

#include "core/math.h"
#include "core/node_layout.h"
#include "layout/workspace.h"

namespace moe::layout {

/// Map of a rail region: memory of one buffer that ranks of other nodes put into and
/// send from. It begins at the same symmetric address on every rank, so that an offset names the
/// same place everywhere.
///
/// Byte map, N nodes, P = N - 1 of them remote, a ring of D entries, M chunks at most (every part
/// begins at a multiple of 64):
///   row that is sent          row_stride: Row::stride, and room for the sets of tokens of a rank
///                             (TokenSetMap), which come right behind what is used of the row
///   second offer that is sent 64
///   rows that came            D x P x row_stride
///   second offers that came   D x P x 64
///   chunk signals             P x M x 8: a chunk of a dispatch or a request of a combine came
///   reply signals             P x M x 8: rows of a combine came
///   outgoing areas            P x area_bytes
///   incoming areas            P x area_bytes
/// Signals hold the epoch of what came last; zeros at first.
struct RailRegion {
  int32_t num_nodes = 1;
  int32_t depth = 1;
  int64_t num_max_chunks = 0;
  int64_t area_bytes = 0;
  int64_t row_stride = 0;

  int64_t second_offer_out = 0;
  int64_t rows_in = 0;
  int64_t second_offers_in = 0;
  int64_t chunk_signals = 0;
  int64_t reply_signals = 0;
  int64_t areas_out = 0;
  int64_t areas_in = 0;
  int64_t bytes = 0;

  /// @param area_bytes  bytes of an area, one for each remote node and direction; a multiple of 64
  /// @param set_bytes   bytes of the sets of a rank
  MOE_HOST_DEVICE static RailRegion make(int num_nodes,
                                         int num_ranks,
                                         int num_experts,
                                         int depth,
                                         int64_t num_max_chunks,
                                         int64_t area_bytes,
                                         int64_t set_bytes = 0) {
    const int64_t num_remote = num_nodes - 1;
    const int64_t signal_bytes = round_up(num_remote * num_max_chunks * 8, 64);
    RailRegion map;
    map.num_nodes = num_nodes;
    map.depth = depth;
    map.num_max_chunks = num_max_chunks;
    map.area_bytes = round_up(area_bytes, 64);
    map.row_stride = Row::stride(num_ranks, num_experts) + round_up(set_bytes, 64);
    map.second_offer_out = map.row_stride;
    map.rows_in = map.second_offer_out + static_cast<int64_t>(sizeof(SecondOffer));
    map.second_offers_in = map.rows_in + depth * num_remote * map.row_stride;
    map.chunk_signals =
        map.second_offers_in + depth * num_remote * static_cast<int64_t>(sizeof(SecondOffer));
    map.reply_signals = map.chunk_signals + signal_bytes;
    map.areas_out = map.reply_signals + signal_bytes;
    map.areas_in = map.areas_out + num_remote * map.area_bytes;
    map.bytes = map.areas_in + num_remote * map.area_bytes;
    return map;
  }

  /// Place of @p node_idx among the remote nodes of @p owner_node.
  MOE_HOST_DEVICE static int64_t place_of(int owner_node, int node_idx) {
    return node_idx < owner_node ? node_idx : node_idx - 1;
  }

  // Offsets. `owner_node` is the node of the rank whose region it is.
  MOE_HOST_DEVICE int64_t row_in(uint64_t epoch, int owner_node, int src_node) const {
    return rows_in + in_ring(epoch, owner_node, src_node) * row_stride;
  }
  MOE_HOST_DEVICE int64_t second_offer_in(uint64_t epoch, int owner_node, int src_node) const {
    return second_offers_in + in_ring(epoch, owner_node, src_node) * int64_t{sizeof(SecondOffer)};
  }
  MOE_HOST_DEVICE int64_t chunk_signal(int owner_node, int src_node, int64_t chunk_idx) const {
    return chunk_signals + (place_of(owner_node, src_node) * num_max_chunks + chunk_idx) * 8;
  }
  MOE_HOST_DEVICE int64_t reply_signal(int owner_node, int src_node, int64_t chunk_idx) const {
    return reply_signals + (place_of(owner_node, src_node) * num_max_chunks + chunk_idx) * 8;
  }
  MOE_HOST_DEVICE int64_t area_out(int owner_node, int dst_node) const {
    return areas_out + place_of(owner_node, dst_node) * area_bytes;
  }
  MOE_HOST_DEVICE int64_t area_in(int owner_node, int src_node) const {
    return areas_in + place_of(owner_node, src_node) * area_bytes;
  }

 private:
  MOE_HOST_DEVICE int64_t in_ring(uint64_t epoch, int owner_node, int src_node) const {
    const auto entry = static_cast<int64_t>(epoch % static_cast<uint64_t>(depth));
    return entry * (num_nodes - 1) + place_of(owner_node, src_node);
  }
};

/// Record of a token on its way to another node: once, with its places there.
///
/// Byte map of a record (`bytes` is a multiple of 16):
///   [0, row_bytes)       the row as it arrives, quantized where that is asked for
///   [scales_offset, ..)  its scale factors
///   [slots_offset, ..)   num_slots x int64, Slot::kNone for those of other nodes
///   [ids_offset, ..)     rank-major with weights or ids: num_topk x int64, global ids
///   [weights_offset, ..) num_topk weights
/// A chunk is its header (kHeaderBytes: int64 number of records, rest unused) and its records. On
/// the CPU the same tokens have another map, InternodeChunk, which says why.
struct RailRecord {
  static constexpr int64_t kHeaderBytes = 16;

  int64_t row_bytes = 0;
  int64_t scales_offset = 0;
  int64_t slots_offset = 0;
  int64_t ids_offset = 0;
  int64_t weights_offset = 0;
  int64_t bytes = 0;

  /// @param num_topk  choices of a token on the rank that sends
  MOE_HOST_DEVICE static RailRecord make(RowLayout layout,
                                         int num_ranks,
                                         int64_t num_topk,
                                         int64_t row_bytes,
                                         int64_t scale_row_bytes,
                                         int64_t weight_bytes,
                                         bool with_topk_idx) {
    const bool is_by_rank = layout == RowLayout::kRankMajor;
    const int64_t num_slots = is_by_rank && num_ranks < num_topk ? num_ranks : num_topk;
    const bool has_ids = is_by_rank && (weight_bytes > 0 || with_topk_idx);
    RailRecord record;
    record.row_bytes = row_bytes;
    record.scales_offset = round_up(row_bytes, 16);
    record.slots_offset = round_up(record.scales_offset + scale_row_bytes, 8);
    record.ids_offset = record.slots_offset + num_slots * 8;
    record.weights_offset = record.ids_offset + (has_ids ? num_topk * 8 : 0);
    record.bytes = round_up(record.weights_offset + num_topk * weight_bytes, 16);
    return record;
  }

  MOE_HOST_DEVICE int64_t chunk_bytes(int64_t num_records) const {
    return kHeaderBytes + num_records * bytes;
  }
};

/// Messages of a combine over a rail: requests (slots, in the order of tokens and positions) and
/// replies. Both lie in an area side by side: first the requests of all chunks, then `num_windows`
/// places for replies, which chunks use in turn.
///
/// Byte map of a request: header (kHeaderBytes), `num_slots` slots (int64), then with
/// node_reduction
///   as many weights of `weight_bytes`, which may be 0. With node_reduction the first slot of each
///   token has Slot::kFirstOfToken set.
/// Byte map of a reply, r rows for a request of s slots: r x row_stride, then s x weights_stride of
///   weights that are pulled. Row i answers slot i; with node_reduction it is the sum for the i-th
///   token.
struct RailReply {
  struct Header {
    int32_t num_slots;
    int32_t num_rows;
    int32_t place;  ///< place of the reply
    int32_t weight_bytes;
  };
  static constexpr int64_t kHeaderBytes = sizeof(Header);

  int64_t tokens_per_chunk = 0;
  int64_t num_slots = 0;
  int64_t row_stride = 0;
  int64_t weights_stride = 0;
  int64_t rows_per_token = 0;  ///< from one node, at most
  int64_t request_stride = 0;
  int64_t replies_offset = 0;  ///< in an area
  int64_t num_windows = 0;     ///< 0 where an area is too small for one

  /// @param num_slots     slots of a token, the most of any rank
  /// @param pulled_bytes  bytes of the weights that are pulled with a row, all of them
  /// @param weight_bytes  most bytes of a weight that is applied: with node_reduction it travels
  MOE_HOST_DEVICE static RailReply make(const RailRegion& region,
                                        int64_t tokens_per_chunk,
                                        int64_t num_slots,
                                        int64_t row_bytes,
                                        int64_t pulled_bytes,
                                        bool node_reduction,
                                        int64_t weight_bytes) {
    const int64_t slot_bytes = 8 + (node_reduction ? weight_bytes : 0);
    RailReply reply;
    reply.tokens_per_chunk = tokens_per_chunk;
    reply.num_slots = num_slots;
    reply.row_stride = round_up(row_bytes, 16);
    reply.weights_stride = pulled_bytes;
    reply.rows_per_token = node_reduction ? 1 : num_slots;
    reply.request_stride = kHeaderBytes + round_up(tokens_per_chunk * num_slots * slot_bytes, 16);
    reply.replies_offset = region.num_max_chunks * reply.request_stride;
    const int64_t left = region.area_bytes - reply.replies_offset;
    const int64_t window = reply.window_bytes();
    reply.num_windows = left < 0 || window == 0 ? 0 : left / window;
    return reply;
  }

  /// Bytes of a place for a reply.
  MOE_HOST_DEVICE int64_t window_bytes() const {
    return round_up(reply_bytes(tokens_per_chunk * rows_per_token, tokens_per_chunk * num_slots),
                    16);
  }
  MOE_HOST_DEVICE int64_t reply_bytes(int64_t num_rows, int64_t num_requested) const {
    return num_rows * row_stride + num_requested * weights_stride;
  }
  /// @param weight_bytes  bytes of each weight in this request
  MOE_HOST_DEVICE static int64_t request_bytes(int64_t num_requested, int64_t weight_bytes = 0) {
    return kHeaderBytes + num_requested * (8 + weight_bytes);
  }
};

/// The largest operation of a buffer across nodes: its memory between nodes cannot grow later.
struct LargestOperation {
  int64_t num_max_tokens = 0;  ///< most tokens of one rank; -1 where unknown
  int64_t num_max_topk = 0;    ///< 0 where unknown
  int64_t max_row_bytes = 0;   ///< most bytes of a row with its scale factors; 0 where unknown
  /// A node sends sums of rows to the others, one for a token.
  bool node_reduction = false;
  /// Experts with several slots at most, where RANK_MAJOR balances them.
  int num_max_shared = 0;
};

/// The rail region of a buffer on every rank. An area holds all rows of a dispatch, or the requests
/// of a combine and some replies.
/// @param depth  Entries of the ring of a buffer.
/// @throws InvalidArgument  something about the largest operation is unknown.
///
/// Example: 16 ranks, 8 a node, 256 experts, depth 4, 4096 tokens, top-8, rows of 14336 + 896
/// bytes: 512 chunks of 8 records of 15424 bytes, 63184896 bytes an area, 126384704 in all.
RailRegion rail_region(const LargestOperation& largest,
                       NodeLayout nodes,
                       int num_experts,
                       int depth);

}  // namespace moe::layout
