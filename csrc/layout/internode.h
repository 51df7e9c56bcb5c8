#pragma once

#include <algorithm>
#include <cstdint>

#include "core/math.h"
#include "layout/internode_chunks.h"
#include "layout/routing.h"
#include "layout/row.h"

namespace moe::layout {

/// Parts of every row that one rank dispatches to another node; equal at both ends, which
/// know it from the operation's arguments and the count matrix.
struct InternodeRow {
  int64_t row_bytes = 0;
  int64_t scale_bytes = 0;   ///< bytes of all scale factors of a row
  int64_t num_slots = 0;     ///< expert-major: choices of the source; rank-major: most ranks there
  int64_t weight_bytes = 0;  ///< bytes of the weights of all choices of a token
  int64_t num_ids = 0;       ///< int32 expert ids: choices of the source where they are needed

  /// @param num_local_ranks  Ranks of a node.
  /// @param with_ids  Rank-major with weights or ids; or column-major scale factors, which are
  ///   collected by expert.
  static InternodeRow make(RowLayout layout,
                           int64_t row_bytes,
                           int64_t scale_bytes,
                           int64_t weight_bytes,
                           int64_t num_topk,
                           int num_local_ranks,
                           bool with_ids) {
    return {row_bytes,
            scale_bytes,
            num_slots_per_token(layout, num_topk, num_local_ranks),
            weight_bytes * num_topk,
            with_ids ? num_topk : 0};
  }

  int64_t bytes() const {
    return row_bytes + scale_bytes + num_slots * 8 + weight_bytes + num_ids * 4;
  }
};

/// One message of dispatched rows between two nodes: each token once, with where it goes there.
///
/// Byte map, n rows (parts start at multiples of 64):
///   [0, n * row_bytes)     rows, as they will lie in the windows
///   [scales_at, ...)       n * scale_bytes scale factors, a row's side by side
///   [slots_at, ...)        n * num_slots int64 Slot: expert-major entry k for choice k, kNone for
///                          one that goes elsewhere; rank-major one per rank there, then kNone
///   [weights_at, ...)      n * weight_bytes weights, one per choice
///   [ids_at, ...)          n * num_ids int32 expert ids
///
/// Kernels have a map of their own for the same tokens, RailRecord. Here the number of rows is
/// known before the first is packed, so that equal parts lie side by side, without gaps; a warp
/// learns it last, and no offset of a record may depend on it.
///
/// Example: bf16, hidden 4096, top-8, expert-major, float32 weights: a row takes 8192 + 64 + 32
/// bytes. 126 of them fit into 1 MiB: slots_at = 1032192, weights_at = 1040256, bytes = 1044288.
struct InternodeChunk {
  int64_t num_rows = 0;
  int64_t scales_at = 0;
  int64_t slots_at = 0;
  int64_t weights_at = 0;
  int64_t ids_at = 0;
  int64_t bytes = 0;

  static InternodeChunk make(const InternodeRow& row, int64_t num_rows) {
    InternodeChunk chunk;
    chunk.num_rows = num_rows;
    chunk.scales_at = round_up(num_rows * row.row_bytes, 64);
    chunk.slots_at = round_up(chunk.scales_at + num_rows * row.scale_bytes, 64);
    chunk.weights_at = round_up(chunk.slots_at + num_rows * row.num_slots * 8, 64);
    chunk.ids_at = round_up(chunk.weights_at + num_rows * row.weight_bytes, 64);
    chunk.bytes = round_up(chunk.ids_at + num_rows * row.num_ids * 4, 64);
    return chunk;
  }
};

/// Tells messages of equal size apart where they are checked; equal at both ends.
///
/// With Communicator's check_messages four bytes follow every message between nodes: the CRC-32C of
/// this, then of the message.
///
/// Byte map (16 bytes): see the fields.
struct MessageId {
  static constexpr int64_t kChecksumBytes = 4;

  uint64_t epoch = 0;     ///< epoch of the operation
  uint32_t src_rank = 0;  ///< in the communicator
  /// Number of the message among those to that rank in the operation; 0 is the row.
  uint32_t message_idx = 0;
};
static_assert(sizeof(MessageId) == 16);

/// Says how many rows follow from one rank to one node; sent where the count matrix has any.
///
/// Byte map (8 bytes): [0, 8) num_rows.
struct InternodeHeader {
  int64_t num_rows = 0;
};
static_assert(sizeof(InternodeHeader) == 8);

/// Bytes that one rank sends to one other node in a dispatch whose rows have been agreed on: none
/// for no rows, else the header and the chunks. Its row, `Row::stride()` bytes, and a second offer,
/// 64 bytes, where it was short, come before that.
inline int64_t internode_dispatch_bytes(const InternodeRow& row,
                                        int64_t num_rows,
                                        int num_nodes,
                                        bool checks_messages) {
  if (num_rows == 0)
    return 0;
  const int64_t per_chunk = InternodeCut::rows_per_chunk(row.bytes(), num_nodes);
  const int64_t num_full = num_rows / per_chunk;
  const int64_t num_left = num_rows % per_chunk;
  const int64_t num_messages = 1 + num_full + (num_left > 0 ? 1 : 0);
  return static_cast<int64_t>(sizeof(InternodeHeader)) +
         num_full * InternodeChunk::make(row, per_chunk).bytes +
         (num_left > 0 ? InternodeChunk::make(row, num_left).bytes : 0) +
         (checks_messages ? num_messages * MessageId::kChecksumBytes : 0);
}

}  // namespace moe::layout
