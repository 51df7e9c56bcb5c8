#pragma once

#include <algorithm>
#include <cstdint>

#include "core/node_layout.h"
#include "layout/internode.h"
#include "layout/routing.h"

namespace moe::layout {

/// One row as it comes back to its source: its elements, then the weights pulled with it.
struct PulledRow {
  int64_t row_bytes = 0;     ///< 0 when weights alone are pulled
  int64_t weight_bytes = 0;  ///< bytes of a weight; 0 for none
  int64_t num_weights = 0;   ///< with a row: 1, or (rank-major) the choices of a source's token

  int64_t weights_bytes() const { return num_weights * weight_bytes; }
  int64_t bytes() const { return row_bytes + weights_bytes(); }
};

/// Cut of the rows that one rank pulls from one other node into messages, each [rows][weights
/// of those rows]; InternodeCut says how many bytes and how many at a time. With node_reduction a
/// row is the sum of a token's rows on that node, and has the weights of all of them.
struct PullChunks {
  int64_t num_rows = 0;
  int64_t rows_per_chunk = 1;

  /// @param num_slots  Most rows of one token: they fit one chunk, so that two always hold a token.
  static PullChunks make(const PulledRow& pulled,
                         int64_t num_rows,
                         int64_t num_slots,
                         int num_nodes) {
    const int64_t most_rows =
        InternodeCut::chunk_bytes(num_nodes) / std::max<int64_t>(pulled.bytes(), 1);
    return {num_rows, std::max({most_rows, num_slots, int64_t{1}})};
  }

  /// With node_reduction.
  /// @param num_sums  Tokens with rows on that node.
  static PullChunks of_sums(const PulledRow& pulled,
                            int64_t num_sums,
                            int64_t num_slots,
                            int num_nodes) {
    const int64_t most_bytes = pulled.row_bytes + num_slots * pulled.weights_bytes();
    const int64_t most_sums =
        InternodeCut::chunk_bytes(num_nodes) / std::max<int64_t>(most_bytes, 1);
    return {num_sums, std::max<int64_t>(most_sums, 1)};
  }

  int64_t num_chunks() const { return (num_rows + rows_per_chunk - 1) / rows_per_chunk; }
  int64_t rows_of(int64_t chunk_idx) const {
    return std::min(rows_per_chunk, num_rows - chunk_idx * rows_per_chunk);
  }
};

/// Bytes that one rank sends to one other node in a combine whose rows have been agreed on: the
/// slots of the rows that it wants from there, and the rows that are wanted from its own node. Its
/// row, `Row::stride()` bytes, comes before that.
///
/// Example: bf16, hidden 4096: 8 bytes go out for every row that comes back, which takes 8192.
inline int64_t internode_combine_bytes(int64_t num_wanted_rows,
                                       const PulledRow& supplied,
                                       int64_t num_supplied_rows) {
  return num_wanted_rows * static_cast<int64_t>(sizeof(int64_t)) +
         num_supplied_rows * supplied.bytes();
}

/// The rows that one rank wants added on one other node, in the order of its tokens and their
/// slots.
///
/// Byte map, n rows: [0, 8 n) slots, the first of every token with Slot::kFirstOfToken;
///   [8 n, + n * weight_bytes) weights to apply, 1 where the combine has none. Rank-major: no
///   weights.
struct SumRequest {
  int64_t num_rows = 0;
  int64_t weight_bytes = 0;  ///< bytes of a weight: those of the type rows are added in

  int64_t weights_at() const { return num_rows * static_cast<int64_t>(sizeof(int64_t)); }
  int64_t bytes() const { return weights_at() + num_rows * weight_bytes; }
};

/// internode_combine_bytes() with node_reduction.
/// @param wanted             Request of this rank.
/// @param num_supplied_sums  Tokens of the other rank with rows on this node.
/// @param num_supplied_rows  Rows of those tokens on this node, each with its pulled weights.
///
/// Example: bf16, hidden 4096, four rows of a token there: 48 bytes go out for 8192 that come back.
inline int64_t internode_reduction_bytes(const SumRequest& wanted,
                                         const PulledRow& supplied,
                                         int64_t num_supplied_sums,
                                         int64_t num_supplied_rows) {
  return wanted.bytes() + num_supplied_sums * supplied.row_bytes +
         num_supplied_rows * supplied.weights_bytes();
}

/// Bytes of the checksums of those messages, where messages are checked.
/// @param supplied  Cut of what is wanted from its own node.
inline int64_t internode_pull_checksum_bytes(int64_t num_wanted_rows, const PullChunks& supplied) {
  return ((num_wanted_rows > 0 ? 1 : 0) + supplied.num_chunks()) * MessageId::kChecksumBytes;
}

/// Rows of the tokens of @p src_rank on ranks of @p node_idx, from the count matrix alone.
int64_t num_rows_on_node(const CountMatrix& counts,
                         const Placement& placement,
                         const Arrangement& arrangement,
                         const NodeLayout& nodes,
                         int src_rank,
                         int node_idx);

}  // namespace moe::layout
