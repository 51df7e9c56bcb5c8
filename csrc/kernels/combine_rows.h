#pragma once

#include <cstdint>

#include "device/numbers.h"
#include "device/warp.h"
#include "kernels/combine.h"

// How a warp walks and adds the rows of a token.

namespace moe::kernels {

/// Units that a lane adds side by side: enough loads in flight without shared memory, and sums
/// that stay in registers.
constexpr int kUnitsPerLane = 4;

/// Bytes of a row that a warp adds at a time.
template <typename Unit>
constexpr int64_t kPieceBytes = int64_t{device::kWarpSize} * kUnitsPerLane * sizeof(Unit);

/// The work of a combine, shared out over warps: one piece of the sum of one token, after another.
/// Warps next to each other take adjacent pieces, so that a row is read from end to end at once.
class PieceWalk {
 public:
  MOE_DEVICE PieceWalk(const CombineParams& params, int64_t row_bytes, int64_t piece_bytes)
      : num_pieces_((row_bytes + piece_bytes - 1) / piece_bytes),
        num_items_(params.num_tokens * num_pieces_),
        item_(static_cast<int64_t>(device::block_idx()) * device::num_warps() + device::warp_idx()),
        row_bytes_(row_bytes),
        piece_bytes_(piece_bytes) {
    locate();
  }

  MOE_DEVICE bool has_ended() const { return item_ >= num_items_; }
  MOE_DEVICE void advance() {
    item_ += static_cast<int64_t>(device::num_blocks()) * device::num_warps();
    locate();
  }
  MOE_DEVICE int64_t token_idx() const { return token_idx_; }
  MOE_DEVICE int64_t offset() const { return offset_; }
  MOE_DEVICE int64_t bytes() const {
    const int64_t left = row_bytes_ - offset_;
    return left < piece_bytes_ ? left : piece_bytes_;
  }

 private:
  /// Once per item: a division takes as long as adding a piece of a row.
  MOE_DEVICE void locate() {
    token_idx_ = item_ / num_pieces_;
    offset_ = (item_ - token_idx_ * num_pieces_) * piece_bytes_;
  }

  int64_t num_pieces_;
  int64_t num_items_;
  int64_t item_;
  int64_t row_bytes_;
  int64_t piece_bytes_;
  int64_t token_idx_ = 0;
  int64_t offset_ = 0;
};

/// The rows of one token in slot order. A lane knows one slot; all lanes of the warp call.
template <typename Number, bool kWeighted>
class TokenRows {
 public:
  using Scalar = typename Number::Scalar;

  MOE_DEVICE TokenRows(const CombineParams& params, int64_t row_bytes)
      : params_(params), row_bytes_(row_bytes) {}

  MOE_DEVICE void begin(int64_t token_idx) {
    token_idx_ = token_idx;
    group_ = 0;
    fetch();
  }

  /// Moves to the next row. @return false behind the last.
  MOE_DEVICE bool next() {
    while (left_ == 0) {
      group_ += device::kWarpSize;
      if (group_ >= params_.num_slots)
        return false;
      fetch();
    }
    lane_ = device::first_bit(left_);
    left_ &= ~(uint32_t{1} << lane_);
    return true;
  }

  MOE_DEVICE const std::byte* row() const {
    return reinterpret_cast<const std::byte*>(device::shuffle(row_, lane_));
  }
  MOE_DEVICE Scalar weight() const { return device::shuffle(weight_, lane_); }

 private:
  /// Every lane looks up a slot.
  MOE_DEVICE void fetch() {
    using layout::Slot;
    const int slot_idx = group_ + device::lane_idx();
    bool has_row = false;
    if (slot_idx < params_.num_slots) {
      const int64_t slot =
          device::load_constant(params_.slots + token_idx_ * params_.num_slots + slot_idx);
      has_row = slot != Slot::kNone;
      if (has_row) {
        const std::byte* const rows =
            device::load_constant(&params_.tables.peers[Slot::rank_idx(slot)].rows);
        row_ = reinterpret_cast<uint64_t>(offset_ptr(rows, Slot::row_idx(slot), row_bytes_));
        if constexpr (kWeighted)
          weight_ = load_weight(token_idx_ * params_.num_topk + slot_idx);
      }
    }
    left_ = device::ballot(has_row);
  }

  MOE_DEVICE Scalar load_weight(int64_t choice) const {
    if constexpr (sizeof(Scalar) == 8)
      if (params_.weight_bytes == 8)
        return device::load_constant(reinterpret_cast<const double*>(params_.weights) + choice);
    return device::load_constant(reinterpret_cast<const float*>(params_.weights) + choice);
  }

  const CombineParams& params_;
  int64_t row_bytes_;
  int64_t token_idx_ = 0;
  int group_ = 0;
  int lane_ = 0;
  uint32_t left_ = 0;
  uint64_t row_ = 0;
  Scalar weight_ = 0;
};

/// What a lane has of a piece: its units lie kWarpSize units apart, so that a warp reads adjacent
/// bytes.
template <typename Unit>
struct LaneUnits {
  Unit units[kUnitsPerLane];

  /// @param piece  Of a row in global or shared memory.
  MOE_DEVICE void load(const std::byte* piece, int num_units) {
    const auto* const from = reinterpret_cast<const Unit*>(piece);
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i) {
      const int unit_idx = i * device::kWarpSize + device::lane_idx();
      units[i] = unit_idx < num_units ? device::load(from + unit_idx) : Unit{};
    }
  }
};

/// Sums of a lane's part of a piece, from +0.0.
template <typename Number, typename Unit>
class LaneSums {
 public:
  using Scalar = typename Number::Scalar;

  template <bool kWeighted>
  MOE_DEVICE void add(const LaneUnits<Unit>& row, Scalar weight) {
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i) {
      Scalar values[kElements];
      device::widen_unit<Number, Unit>(row.units[i], values);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        Scalar& sum = sums_[i][j];
        if constexpr (kWeighted)
          sum = device::add(sum, device::multiply(values[j], weight));
        else
          sum = device::add(sum, values[j]);
      }
    }
  }

  /// Adds other sums as they are.
  MOE_DEVICE void add(const LaneSums& other) {
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i)
#pragma unroll
      for (int j = 0; j < kElements; ++j)
        sums_[i][j] = device::add(sums_[i][j], other.sums_[i][j]);
  }

  /// Lanes write adjacent units: ordinary stores fill whole sectors, need no shared memory and no
  /// wait for a bulk store.
  /// @tparam kIsReadSoon  by a block that sends it on; else nobody reads the sum in this kernel
  template <bool kIsReadSoon = false>
  MOE_DEVICE void store(std::byte* piece, int num_units) const {
    auto* const to = reinterpret_cast<Unit*>(piece);
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i) {
      const int unit_idx = i * device::kWarpSize + device::lane_idx();
      if (unit_idx >= num_units)
        continue;
      const Unit sum = device::narrow_unit<Number, Unit>(sums_[i]);
      if constexpr (kIsReadSoon)
        device::store(to + unit_idx, sum);
      else
        device::store_streaming(to + unit_idx, sum);
    }
  }

 private:
  static constexpr int kElements = device::kElementsPerUnit<Number, Unit>;

  Scalar sums_[kUnitsPerLane][kElements] = {};
};

}  // namespace moe::kernels
