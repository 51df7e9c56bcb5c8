#pragma once

#include <cstdint>

#include "core/math.h"
#include "device/row_copy.h"
#include "kernels/dispatch_rows.h"
#include "kernels/receive.h"

// Copies of rows that came once to the other slots of their tokens, by the receiver.

namespace moe::kernels {

/// Shared memory of a block that the warps of a receive kernel need to copy rows.
///
/// Byte map of a block: [0, scratch_bytes) words of the functions that blocks call; then per warp,
/// `warp_bytes` each (a multiple of 128): kNumStages pieces, and as many mbarriers from
/// barriers_offset on. Without bulk copies there are the words alone.
struct CopyShape {
  static constexpr int kNumStages = 3;

  bool is_bulk = false;
  BulkPieces pieces;
  int32_t barriers_offset = 0;
  int64_t warp_bytes = 0;
  int64_t scratch_bytes = 0;

  MOE_HOST_DEVICE static CopyShape make(const ReceiveParams& params, int num_threads) {
    CopyShape shape;
    shape.scratch_bytes = round_up(num_threads / 32 * int64_t{4}, 128);
    // Windows begin at multiples of 64 bytes.
    shape.is_bulk = params.arrangement.has_origins && params.is_plain == 0 &&
                    params.row_bytes % DispatchShape::kCopyUnit == 0;
    if (!shape.is_bulk)
      return shape;
    shape.pieces = BulkPieces::make(
        params.row_bytes, DispatchShape::kMostStageBytes, DispatchShape::kCopyUnit);
    shape.barriers_offset = kNumStages * shape.pieces.piece_bytes;
    shape.warp_bytes = round_up(shape.barriers_offset + kNumStages * int64_t{8}, 128);
    return shape;
  }

  MOE_HOST_DEVICE int64_t shared_bytes(int num_threads) const {
    return scratch_bytes + num_threads / 32 * warp_bytes;
  }
};

/// The pieces of the rows of this rank's window that are copies of others, in order. Warps take
/// rows in turn, whether they are copies or not, but no places of a low-latency window that nobody
/// fills. All lanes of a warp call.
///
/// Example: low latency, 2 experts with 4 places each, of which 3 and 2 are filled: rows 0, 1, 2, 4
/// and 5 are looked at, by lanes 0 to 4 of the only warp.
class CopyWalk {
 public:
  struct Piece {
    uint32_t row_idx = 0;
    uint32_t origin_idx = 0;  ///< the row that it is a copy of
    int32_t piece_idx = 0;
  };

  /// @param num_pieces  pieces of a row
  MOE_DEVICE CopyWalk(const ReceiveParams& params, int32_t num_pieces)
      : params_(params),
        peer_(params.tables.peers[params.buffer.rank_idx]),
        base_(device::load_constant(&peer_.rows)),
        num_pieces_(num_pieces),
        place_(
            static_cast<uint32_t>(device::warp_idx() * device::num_blocks() + device::block_idx()) +
            (device::lane_idx() - device::kWarpSize) * step()) {
    piece_.piece_idx = num_pieces;
  }

  /// Moves to the next piece. @return false behind the last.
  MOE_DEVICE bool advance() {
    if (piece_.piece_idx + 1 < num_pieces_) {
      ++piece_.piece_idx;
      return true;
    }
    while (copies_ == 0)
      if (!look_at_rows())
        return false;
    const int lane = device::first_bit(copies_);
    copies_ &= copies_ - 1;
    piece_ = {device::shuffle(lane_row(), lane), device::shuffle(lane_origin_, lane), 0};
    return true;
  }
  MOE_DEVICE const Piece& piece() const { return piece_; }

  MOE_DEVICE std::byte* row(const Piece& piece) const {
    return offset_ptr(base_, piece.row_idx, params_.row_bytes);
  }
  MOE_DEVICE const std::byte* origin(const Piece& piece) const {
    return offset_ptr(base_, piece.origin_idx, params_.row_bytes);
  }

  /// Data beside the row that is the same for all slots of a token.
  MOE_DEVICE void copy_scales(const Piece& piece) const {
    const layout::ScaleMap map = load_scale_map(&peer_.window.scales);
    if (map.num_scales == 0)
      return;
    std::byte* const scales = base_ + device::load_constant(&peer_.window.scales_offset);
    const std::byte* const from = scales + map.place(piece.origin_idx);
    std::byte* const to = scales + map.place(piece.row_idx);
    const int64_t bytes = map.num_scales * map.scale_bytes;
    const int unit = map.is_column_major ? static_cast<int>(map.scale_bytes)
                                         : device::widest_unit(static_cast<uint64_t>(bytes));
    const int64_t step = map.is_column_major ? map.step() : unit;
    device::copy_strided(to, step, from, step, static_cast<int>(bytes / unit), unit);
  }

 private:
  /// Distance from a row that a warp looks at to its next.
  static MOE_DEVICE uint32_t step() {
    return static_cast<uint32_t>(device::num_blocks() * device::num_warps());
  }

  /// A lane looks at one row. @return false behind the last.
  MOE_DEVICE bool look_at_rows() {
    const bool is_there = find_row();
    lane_origin_ = lane_row();
    if (is_there) {
      const std::byte* const origins = base_ + device::load_constant(&peer_.window.origins_offset);
      lane_origin_ = device::load(reinterpret_cast<const uint32_t*>(origins) + lane_row());
    }
    copies_ = device::ballot(lane_origin_ != lane_row());
    return device::any(is_there);
  }

  /// Moves this lane to its next row. @return false behind the last.
  MOE_DEVICE bool find_row() {
    place_ += device::kWarpSize * step();
    const uint32_t num_groups =
        is_low_latency() ? static_cast<uint32_t>(params_.buffer.num_local_experts) : 1;
#pragma unroll 1
    for (; group_idx_ < num_groups; ++group_idx_) {
      const uint32_t num_rows = num_filled(group_idx_);
      if (place_ < num_rows)
        return true;
      place_ -= num_rows;
    }
    return false;
  }

  /// Rows of a group that have an origin. They are at its beginning: what is not filled has one,
  /// too, but in a low-latency window, where nobody writes it.
  MOE_DEVICE uint32_t num_filled(uint32_t group_idx) const {
    return static_cast<uint32_t>(
        is_low_latency() ? device::load_constant(params_.tables.num_tokens_per_expert + group_idx)
                         : device::load_constant(params_.tables.num_rows));
  }

  MOE_DEVICE uint32_t lane_row() const {
    return group_idx_ * static_cast<uint32_t>(params_.arrangement.rows_per_expert) + place_;
  }
  MOE_DEVICE bool is_low_latency() const {
    return params_.arrangement.layout == layout::RowLayout::kLowLatency;
  }

  const ReceiveParams& params_;
  const Peer& peer_;
  std::byte* base_;
  int32_t num_pieces_;
  /// The row that this lane looked at last: of an expert in low latency, else of the one group.
  uint32_t group_idx_ = 0;
  uint32_t place_;            ///< in its group
  uint32_t lane_origin_ = 0;  ///< origin of that row
  uint32_t copies_ = 0;       ///< lanes whose rows are still to be copied
  Piece piece_;
};

/// Copies the rows of this warp by bulk copies through its stages.
MOE_DEVICE void copy_by_bulk_copies(const ReceiveParams& params,
                                    const CopyShape& shape,
                                    std::byte* memory) {
  const BulkPieces& pieces = shape.pieces;
  CopyWalk walk(params, pieces.num_pieces);
  device::StageRing<CopyShape::kNumStages> ring(
      memory,
      pieces.piece_bytes,
      reinterpret_cast<device::MBarrier*>(memory + shape.barriers_offset));
  const auto bytes_of = [&](const CopyWalk::Piece& piece) {
    return static_cast<uint32_t>(pieces.bytes_of(piece.piece_idx, params.row_bytes));
  };
  const auto load = [&](uint32_t idx, const CopyWalk::Piece& piece) {
    ring.load(idx, walk.origin(piece) + pieces.offset_of(piece.piece_idx), bytes_of(piece));
  };
  // Bulk copies read what this block acquired of its peers.
  device::fence_proxy_async();
  bool has_piece = walk.advance();
  if (has_piece)
    load(0, walk.piece());
  for (uint32_t idx = 0; has_piece; ++idx) {
    const CopyWalk::Piece piece = walk.piece();
    has_piece = walk.advance();
    if (has_piece)
      load(idx + 1, walk.piece());
    if (device::lane_idx() == 0) {
      ring.await(idx);
      device::bulk_store(
          walk.row(piece) + pieces.offset_of(piece.piece_idx), ring.stage(idx), bytes_of(piece));
      device::commit_bulk_stores();
    }
    if (piece.piece_idx + 1 == pieces.num_pieces)
      walk.copy_scales(piece);
  }
  device::await_bulk_stores<0>();
}

/// Copies the rows of this warp by loads and stores.
MOE_DEVICE void copy_by_loads(const ReceiveParams& params) {
  CopyWalk walk(params, 1);
  const int unit = device::widest_unit(static_cast<uint64_t>(params.row_bytes));
  while (walk.advance()) {
    const CopyWalk::Piece& piece = walk.piece();
    device::copy_row(
        walk.origin(piece), params.row_bytes, unit, 1, [&](int) { return walk.row(piece); });
    walk.copy_scales(piece);
  }
}

}  // namespace moe::kernels
