#pragma once

#include <cstdint>

#include "core/math.h"
#include "kernels/dispatch.h"

namespace moe::kernels {

/// Cut of rows to move. Numbers of 32 bits: kernels keep them in registers.
struct BulkPieces {
  static constexpr int64_t kMostBytes = int64_t{1} << 30;

  int32_t num_pieces = 0;   ///< pieces of a row
  int32_t piece_bytes = 0;  ///< bytes of all pieces but the last, which may be shorter

  /// @param most_bytes    most bytes of a piece, at most kMostBytes
  /// @param unit          bytes that a piece is a multiple of, at most most_bytes
  /// @param least_pieces  pieces at least, if the unit allows so many
  MOE_HOST_DEVICE static BulkPieces make(int64_t row_bytes,
                                         int64_t most_bytes,
                                         int64_t unit,
                                         int64_t least_pieces = 1) {
    const int64_t most = most_bytes / unit * unit;
    const int64_t num_needed = (row_bytes + most - 1) / most;
    const int64_t num_asked = num_needed > least_pieces ? num_needed : least_pieces;
    const int64_t piece_bytes = round_up((row_bytes + num_asked - 1) / num_asked, unit);
    BulkPieces pieces;
    pieces.piece_bytes = static_cast<int32_t>(piece_bytes);
    // Pieces that are rounded up may be fewer.
    pieces.num_pieces =
        row_bytes > 0 ? static_cast<int32_t>((row_bytes + piece_bytes - 1) / piece_bytes) : 1;
    return pieces;
  }

  MOE_HOST_DEVICE int64_t offset_of(int32_t piece_idx) const {
    return int64_t{piece_idx} * piece_bytes;
  }
  MOE_HOST_DEVICE int32_t bytes_of(int32_t piece_idx, int64_t row_bytes) const {
    const int64_t left = row_bytes - offset_of(piece_idx);
    return left < piece_bytes ? static_cast<int32_t>(left) : piece_bytes;
  }
};

/// Cut of rows into pieces in a dispatch, and of a block's shared memory into what its warps need.
///
/// Byte map of a block: [0, scratch_bytes) words of the functions that blocks call; then per warp,
/// `warp_bytes` each (a multiple of 128), S stages, K slots per token:
///   [0, S * stage_bytes)   pieces as they come
///   [codes_offset, ...)    S * code_bytes: what they are quantized to
///   [barriers_offset, ...) S mbarriers
///   [slots_offset, ...)    S * K slots, int64
///   [scales_offset, ...)   scale factors of one row
/// Without bulk copies there are no stages and no mbarriers, and the slots of one token.
///
/// Example: rows of 14336 bytes, 8 warps: 2 pieces of 7168 bytes, 3 stages, 172032 bytes of stages.
struct DispatchShape {
  static constexpr int kNumStages = 3;
  /// Bytes of a piece and its codes: enough loads in flight with 8 warps, and 8 warps of 3 stages
  /// fit the 227 KiB of a block.
  static constexpr int64_t kMostStageBytes = 8192;
  static constexpr int64_t kCopyUnit = 16;
  /// Elements that pieces are multiples of: whole blocks of scale factors.
  static constexpr int64_t kPieceElements = 128;
  /// The same where several warps share a row: their scale factors fill words, four to a word.
  static constexpr int64_t kPartElements = 512;

  bool is_bulk = false;
  int num_stages = 0;
  /// Pieces of the row as it is read; without bulk copies one for each warp of a row.
  BulkPieces pieces;
  int32_t stage_bytes = 0;
  int32_t code_bytes = 0;
  int32_t codes_offset = 0;
  int32_t barriers_offset = 0;
  int32_t slots_offset = 0;
  int32_t scales_offset = 0;
  int64_t warp_bytes = 0;
  int64_t scratch_bytes = 0;

  MOE_HOST_DEVICE static DispatchShape make(const DispatchParams& params, int num_threads) {
    const auto element =
        static_cast<int32_t>(params.quantize.is_on ? element_bytes(params.quantize.dtype) : 1);
    DispatchShape shape;
    // Windows begin at multiples of 64 bytes.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(params.x) % kCopyUnit |
                             static_cast<uintptr_t>(params.source_row_bytes % kCopyUnit) |
                             static_cast<uintptr_t>(params.row_bytes % kCopyUnit)) == 0;
    shape.is_bulk = is_aligned && params.is_plain == 0;
    shape.num_stages = shape.is_bulk ? kNumStages : 1;
    const int64_t most_stage_bytes =
        params.quantize.is_on ? kMostStageBytes * element / (element + 1) : kMostStageBytes;
    // Warps that share a quantized row write whole words of its scale factors each.
    const int64_t unit_elements = params.num_parts > 1 ? kPartElements : kPieceElements;
    shape.pieces = BulkPieces::make(params.source_row_bytes,
                                    shape.is_bulk ? most_stage_bytes : BulkPieces::kMostBytes,
                                    params.quantize.is_on ? unit_elements * element : kCopyUnit,
                                    params.num_parts);
    const int32_t stages = shape.is_bulk ? kNumStages : 0;
    if (shape.is_bulk) {
      shape.stage_bytes = shape.pieces.piece_bytes;
      shape.code_bytes = params.quantize.is_on ? shape.stage_bytes / element : 0;
    }
    shape.codes_offset = stages * shape.stage_bytes;
    shape.barriers_offset = shape.codes_offset + stages * shape.code_bytes;
    shape.slots_offset = shape.barriers_offset + stages * 8;
    shape.scales_offset = static_cast<int32_t>(round_up(
        shape.slots_offset + int64_t{8} * shape.num_stages * params.choices.num_slots, 16));
    shape.warp_bytes =
        round_up(shape.scales_offset + int64_t{params.num_scales} * params.scale_bytes, 128);
    shape.scratch_bytes = round_up(num_threads / 32 * int64_t{4} + 4, 128);
    return shape;
  }

  MOE_HOST_DEVICE int64_t shared_bytes(int num_threads) const {
    return scratch_bytes + num_threads / 32 * warp_bytes;
  }
};

}  // namespace moe::kernels
