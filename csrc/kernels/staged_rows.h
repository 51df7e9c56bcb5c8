#pragma once

#include <algorithm>
#include <cstdint>

#include "core/math.h"
#include "device/primitives.h"
#include "kernels/combine.h"
#include "kernels/combine_rows.h"

// Stages through which rows that a combine adds come into shared memory.

namespace moe::kernels {

/// A piece is added in parts, each of which lies in registers.
constexpr int kPartsPerPiece = 2;
constexpr int64_t kPartBytes = kPieceBytes<device::Bytes16>;
/// A bulk copy of so many bytes costs as much to issue as one of half.
constexpr int64_t kMostPieceBytes = kPartsPerPiece * kPartBytes;

// Shared memory of a block of w warps, with bulk copies:
//   [0, 4 * w)          scratch of the block, at least two words
//   then per warp       kWarpBytes: stages of a piece each, as many as fit, at a multiple of 128
//   then per warp       an mbarrier per stage, kMaxStages of them
struct CombineSharedMap {
  /// Two of three pieces are under way while one is added: 128 KiB in a block of
  /// kMaxCombineThreads, which hide the latency of rows of peers.
  static constexpr int64_t kWarpBytes = 3 * kMostPieceBytes;
  static constexpr int kMaxStages = 8;

  int64_t stages_offset;
  int64_t mbarriers_offset;
  int64_t bytes;

  static MOE_HOST_DEVICE CombineSharedMap make(int num_warps) {
    CombineSharedMap map{};
    map.stages_offset = round_up(scratch_bytes(num_warps), 128);
    map.mbarriers_offset = map.stages_offset + num_warps * kWarpBytes;
    map.bytes = map.mbarriers_offset +
                num_warps * kMaxStages * static_cast<int64_t>(sizeof(device::MBarrier));
    return map;
  }
  static MOE_HOST_DEVICE int64_t scratch_bytes(int num_warps) {
    return (num_warps > 2 ? num_warps : 2) * int64_t{4};
  }
  static int32_t num_stages(int64_t piece_bytes) {
    return static_cast<int32_t>(std::min<int64_t>(kWarpBytes / piece_bytes, kMaxStages));
  }
};

/// Stages of one warp: pieces of rows on their way from where the experts put them.
///
/// The lane that knows where a row lies issues its bulk copy. A stage is filled again once all
/// lanes have read it; the phase of its mbarrier flips with every filling.
///
/// @tparam Walk  PieceWalk, or what walks like it
/// @tparam Rows  TokenRows that finds rows, or the same of another walk
template <typename Walk, typename Rows>
class StagedRows {
 public:
  /// @param walk  walk at its beginning
  MOE_DEVICE StagedRows(const Walk& walk, const Rows& rows, const RowPieces& pieces)
      : walk_(walk), rows_(rows), pieces_(pieces) {
    const CombineSharedMap map = CombineSharedMap::make(device::num_warps());
    const int warp_idx = device::warp_idx();
    stages_ = static_cast<int32_t>(map.stages_offset + warp_idx * CombineSharedMap::kWarpBytes);
    mbarriers_ =
        static_cast<int32_t>(map.mbarriers_offset) +
        warp_idx * CombineSharedMap::kMaxStages * static_cast<int32_t>(sizeof(device::MBarrier));
    if (device::lane_idx() == 0) {
#pragma unroll 1
      for (int i = 0; i < pieces_.num_stages; ++i)
        device::init_mbarrier(mbarrier(i), 1);
      device::fence_mbarrier_init();
      // Rows were acquired by loads, in the kernel before or by the caller.
      device::fence_proxy_async();
    }
    device::sync_warp();
    if (walk_.has_ended())
      return;
    begin();
#pragma unroll 1
    for (int i = 0; i < pieces_.num_stages; ++i) {
      fill();
      advance();
    }
  }

  /// Waits for the next piece. @return the place where it lies until release().
  MOE_DEVICE const std::byte* await() const {
    while (!device::try_wait(mbarrier(stage_idx_), parity_)) {
    }
    return stage();
  }

  /// This lane has read the piece; once all have, its stage is filled again.
  MOE_DEVICE void release() {
    device::sync_warp();
    fill();
    advance();
  }

 private:
  MOE_DEVICE device::MBarrier* mbarrier(int stage_idx) const {
    return reinterpret_cast<device::MBarrier*>(device::shared_memory() + mbarriers_) + stage_idx;
  }
  MOE_DEVICE std::byte* stage() const {
    return device::shared_memory() + (stages_ + stage_idx_ * pieces_.bytes);
  }

  MOE_DEVICE void begin() {
    rows_.begin(walk_);
    bytes_ = static_cast<uint32_t>(walk_.bytes());
  }

  /// Begins to load the piece behind the last that was begun, if there is one, into a free stage.
  MOE_DEVICE void fill() {
    while (!rows_.next(walk_)) {
      walk_.advance();
      if (walk_.has_ended())
        break;
      begin();
    }
    if (rows_.is_known_here()) {
      device::arrive_expect(mbarrier(stage_idx_), bytes_);
      device::bulk_load(stage(), rows_.known_row(), bytes_, mbarrier(stage_idx_));
    }
  }

  /// Moves to the next stage; the first comes behind the last, in another phase.
  MOE_DEVICE void advance() {
    if (++stage_idx_ < pieces_.num_stages)
      return;
    stage_idx_ = 0;
    parity_ ^= 1;
  }

  Walk walk_;
  Rows rows_;
  const RowPieces& pieces_;
  // Stages of the warp, in the block's shared memory.
  int32_t stages_;
  int32_t mbarriers_;
  uint32_t bytes_ = 0;   ///< bytes of the piece of a row that is loaded
  int stage_idx_ = 0;    ///< stage of the piece that is taken next
  uint32_t parity_ = 1;  ///< 0 once every stage was filled
};

}  // namespace moe::kernels
