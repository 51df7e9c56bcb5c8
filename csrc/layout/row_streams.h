#pragma once

#include <cstdint>
#include <vector>

#include "layout/routing.h"

namespace moe::layout {

/// The rows of a dispatch where ranks exchange streams of rows, one from each to each, rather than
/// store into each other's windows. Rows of a stream come by ascending slot, so that a receiver
/// knows the place of each from the count matrix alone.
///
/// Example: 2 ranks, 1 expert each, expert-major, rank 0 chooses [[1], [0], [1]] and rank 1 [[0]].
/// Rank 0: num_sent = [1, 2], positions = [1, 0, 2], sent_slots = [1, 0, 2], num_received = [1, 1],
/// window_rows = [0, 1].
struct RowStreams {
  std::vector<int64_t> num_sent;      ///< [num_ranks], rows to each rank
  std::vector<int64_t> num_received;  ///< [num_ranks], rows from each rank
  /// [num_tokens, num_slots], where among the rows that this rank sends the one of a slot is, or -1
  std::vector<int64_t> positions;
  /// [rows sent], the inverse: where among the slots the one of a row is
  std::vector<int64_t> sent_slots;
  std::vector<int64_t> window_rows;  ///< [rows received], the window's row for each that arrives
};

/// @param topk_idx  [num_tokens, num_topk]
/// @param slots     [num_tokens, num_slots], of assign_slots() with the same arguments
RowStreams row_streams(const int64_t* topk_idx,
                       int64_t num_tokens,
                       int64_t num_topk,
                       const int64_t* slots,
                       const CountMatrix& counts,
                       const Placement& placement,
                       const Arrangement& arrangement,
                       int rank_idx);

/// Position, as in RowStreams, of the row that holds a choice: rank-major, choices on one rank
/// share it.
/// @param slots, positions  [num_tokens, num_slots]
/// @param choices           [num_tokens, num_topk], written: -1 where a choice is unused or dropped
void choice_positions(const int64_t* topk_idx,
                      int64_t num_tokens,
                      int64_t num_topk,
                      const int64_t* slots,
                      const int64_t* positions,
                      const Placement& placement,
                      const Arrangement& arrangement,
                      int64_t* choices);

}  // namespace moe::layout
