#pragma once

#include <cstdint>

#include "core/math.h"
#include "layout/row.h"

namespace moe::layout {

/// Places of the scale factors of quantized rows in a receive window.
///
/// Row-major: [num_rows, num_scales]. Column-major: groups of `group_rows` rows, each
/// [num_scales, group_stride], so that the factors of one block are adjacent for successive rows.
///
/// Example: 3 rows, 2 factors of 4 bytes, column-major: group_rows 3, group_stride 4 (16 bytes),
/// factor 1 of row 2 lies at 4 * (1 * 4 + 2) = 24.
struct ScaleMap {
  int64_t num_scales = 0;
  int64_t scale_bytes = 0;
  bool is_column_major = false;
  int64_t group_rows = 1;
  int64_t group_stride = 1;

  MOE_HOST_DEVICE static ScaleMap make(RowLayout layout,
                                       int64_t num_rows,
                                       int64_t rows_per_expert,
                                       int64_t num_scales,
                                       int64_t scale_bytes,
                                       bool is_column_major) {
    ScaleMap map;
    map.num_scales = num_scales;
    map.scale_bytes = scale_bytes;
    map.is_column_major = is_column_major;
    if (!is_column_major || num_scales == 0)
      return map;
    if (layout == RowLayout::kLowLatency) {
      map.group_rows = rows_per_expert;
      map.group_stride = rows_per_expert;
    } else {
      map.group_rows = num_rows;
      map.group_stride = round_up(num_rows, kColumnBytes / scale_bytes);
    }
    map.group_rows = map.group_rows > 0 ? map.group_rows : 1;
    return map;
  }

  /// Bytes from the start of the region to factor 0 of a row.
  MOE_HOST_DEVICE int64_t place(int64_t row_idx) const {
    if (!is_column_major)
      return row_idx * num_scales * scale_bytes;
    return (row_idx / group_rows * num_scales * group_stride + row_idx % group_rows) * scale_bytes;
  }
  /// Bytes from a factor of a row to the next.
  MOE_HOST_DEVICE int64_t step() const {
    return is_column_major ? group_stride * scale_bytes : scale_bytes;
  }

  MOE_HOST_DEVICE int64_t bytes(int64_t num_rows) const {
    if (!is_column_major)
      return num_rows * num_scales * scale_bytes;
    return (num_rows + group_rows - 1) / group_rows * num_scales * group_stride * scale_bytes;
  }

 private:
  // Grouped GEMMs load columns in units of 16 bytes.
  static constexpr int64_t kColumnBytes = 16;
};

/// Window of a rank for one dispatch: rows, then what travels with them.
///
/// Byte map, M rows, K choices per token (regions start at multiples of 64):
///   [0, M * row_bytes)        rows
///   [scales_offset, ...)      scale factors of quantized rows, see ScaleMap
///   [weights_offset, ...)     M (rank-major: M * K) weights of `weight_bytes`
///   [topk_idx_offset, ...)    rank-major, uncached: M * K int64 local expert ids
///   [origins_offset, ...)     by expert, see Arrangement::has_origins: M int32, of every row the
///                             row that its bytes come to: its own, or that which it is a copy of
/// Sender and receiver compute it from the same count matrix.
struct ReceiveWindow {
  int64_t scales_offset = 0;
  int64_t weights_offset = 0;
  int64_t topk_idx_offset = 0;
  int64_t origins_offset = 0;
  int64_t bytes = 0;
  ScaleMap scales;

  MOE_HOST_DEVICE static ReceiveWindow make(RowLayout layout,
                                            int64_t num_rows,
                                            int64_t row_bytes,
                                            const ScaleMap& scales,
                                            int64_t weight_bytes,
                                            int64_t num_topk,
                                            bool with_topk_idx,
                                            bool with_origins) {
    const int64_t per_row = layout == RowLayout::kRankMajor ? num_topk : 1;
    ReceiveWindow window;
    window.scales = scales;
    window.scales_offset = round_up(num_rows * row_bytes, 64);
    window.weights_offset = round_up(window.scales_offset + scales.bytes(num_rows), 64);
    window.topk_idx_offset =
        round_up(window.weights_offset + num_rows * per_row * weight_bytes, 64);
    window.bytes = window.topk_idx_offset + (with_topk_idx ? num_rows * per_row * 8 : 0);
    window.origins_offset = round_up(window.bytes, 64);
    if (with_origins)
      window.bytes = window.origins_offset + num_rows * 4;
    return window;
  }
};

}  // namespace moe::layout
