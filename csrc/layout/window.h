#pragma once

#include <cstdint>

#include "core/math.h"
#include "layout/row.h"

namespace moe::layout {

/// What a rank receives in one dispatch: rows, then what travels with them.
///
/// Byte map, M rows, K choices per token (regions start at multiples of 64):
///   [0, M * row_bytes)        rows
///   [weights_offset, ...)     M (expert-major) or M * K (rank-major) weights of `weight_bytes`
///   [topk_idx_offset, ...)    rank-major, uncached: M * K int64 local expert ids
/// Sender and receiver compute it from the same count matrix.
struct ReceiveWindow {
  int64_t weights_offset = 0;
  int64_t topk_idx_offset = 0;
  int64_t bytes = 0;

  static ReceiveWindow make(RowLayout layout,
                            int64_t num_rows,
                            int64_t row_bytes,
                            int64_t weight_bytes,
                            int64_t num_topk,
                            bool with_topk_idx) {
    const int64_t per_row = layout == RowLayout::kRankMajor ? num_topk : 1;
    ReceiveWindow window;
    window.weights_offset = round_up(num_rows * row_bytes, 64);
    window.topk_idx_offset =
        round_up(window.weights_offset + num_rows * per_row * weight_bytes, 64);
    window.bytes = window.topk_idx_offset + (with_topk_idx ? num_rows * per_row * 8 : 0);
    return window;
  }
};

}  // namespace moe::layout
