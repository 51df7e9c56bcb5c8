#pragma once

#include <cstdint>

#include "device/numbers.h"
#include "device/warp.h"
#include "kernels/combine.h"

// Walk of a warp over the rows of a token, which it adds.

namespace moe::kernels {

/// Units that a lane adds side by side: enough loads in flight without shared memory, and sums
/// that stay in registers.
constexpr int kUnitsPerLane = 4;

/// Bytes of a row that a warp adds at a time.
template <typename Unit>
constexpr int64_t kPieceBytes = int64_t{device::kWarpSize} * kUnitsPerLane * sizeof(Unit);

/// Pairs (outer, inner) of which `inner` comes round after num_inner, in one sequence: a first one,
/// and every so many behind it. Two divisions for all of them, in 32 bits: one for each would take
/// as long as adding a piece of a row.
class PairWalk {
 public:
  MOE_DEVICE PairWalk(uint32_t first, uint32_t step, uint32_t num_inner)
      : num_inner_(num_inner),
        outer_step_(step / num_inner),
        inner_step_(step % num_inner),
        outer_(first / num_inner),
        inner_(first % num_inner) {}

  MOE_DEVICE void advance() {
    outer_ += outer_step_;
    inner_ += inner_step_;
    if (inner_ < num_inner_)
      return;
    inner_ -= num_inner_;
    ++outer_;
  }
  MOE_DEVICE uint32_t outer() const { return outer_; }
  MOE_DEVICE uint32_t inner() const { return inner_; }

 private:
  uint32_t num_inner_;
  uint32_t outer_step_;
  uint32_t inner_step_;
  uint32_t outer_;
  uint32_t inner_;
};

/// The work of a combine, shared out over warps: one piece of the sum of one token, after another.
/// Adjacent pieces go to different SMs, which take them at once: few pieces leave none idle.
class PieceWalk {
 public:
  MOE_DEVICE PieceWalk(const CombineParams& params, const RowPieces& pieces)
      : pairs_(
            static_cast<uint32_t>(device::warp_idx() * device::num_blocks() + device::block_idx()),
            static_cast<uint32_t>(device::num_blocks() * device::num_warps()),
            static_cast<uint32_t>(pieces.num_pieces)),
        num_tokens_(static_cast<uint32_t>(params.num_tokens)),
        pieces_(pieces) {}

  MOE_DEVICE bool has_ended() const { return pairs_.outer() >= num_tokens_; }
  MOE_DEVICE void advance() { pairs_.advance(); }
  MOE_DEVICE int64_t token_idx() const { return pairs_.outer(); }
  MOE_DEVICE int64_t offset() const { return int64_t{pairs_.inner()} * pieces_.bytes; }
  MOE_DEVICE int32_t bytes() const {
    const bool is_last = pairs_.inner() + 1 == static_cast<uint32_t>(pieces_.num_pieces);
    return is_last ? pieces_.last_bytes : pieces_.bytes;
  }

 private:
  PairWalk pairs_;
  uint32_t num_tokens_;
  const RowPieces& pieces_;
};

/// The rows of one token in slot order. A lane knows one slot; all lanes of the warp call.
/// @tparam kFindsRows  where they lie is asked for; else how many there are, and their weights
template <typename Number, bool kWeighted, bool kFindsRows>
class TokenRows {
 public:
  using Scalar = typename Number::Scalar;

  MOE_DEVICE TokenRows(const CombineParams& params, int64_t row_bytes)
      : params_(params), row_bytes_(row_bytes) {}

  /// @param walk  has come to another token; it says which piece of rows row() is the address of
  MOE_DEVICE void begin(const PieceWalk& walk) {
    group_ = 0;
    fetch(walk);
  }

  /// Moves to the next row of the token that @p walk is at. @return false behind the last.
  MOE_DEVICE bool next(const PieceWalk& walk) {
    while (left_ == 0) {
      group_ += device::kWarpSize;
      if (group_ >= params_.num_slots) {
        here_ = 0;
        return false;
      }
      fetch(walk);
    }
    take();
    return true;
  }

  /// Calls @p function for every row of the token that @p walk is at.
  template <typename Function>
  MOE_DEVICE void for_each(const PieceWalk& walk, const Function& function) {
#pragma unroll 1
    for (begin(walk); group_ < params_.num_slots; group_ += device::kWarpSize, fetch(walk)) {
#pragma unroll 1
      while (left_ != 0) {
        take();
        function();
      }
    }
  }

  MOE_DEVICE const std::byte* row() const {
    static_assert(kFindsRows);
    return reinterpret_cast<const std::byte*>(device::shuffle(row_, device::first_bit(here_)));
  }
  MOE_DEVICE Scalar weight() const {
    return kWeighted ? device::shuffle(weight_, device::first_bit(here_)) : Scalar{};
  }

  /// Called by one lane alone, which has looked up the row.
  MOE_DEVICE bool is_known_here() const {
    return here_ << (device::kWarpSize - 1 - device::lane_idx()) == kLastBit;
  }
  MOE_DEVICE const std::byte* known_row() const {
    static_assert(kFindsRows);
    return reinterpret_cast<const std::byte*>(row_);
  }

 private:
  static constexpr uint32_t kLastBit = uint32_t{1} << (device::kWarpSize - 1);

  MOE_DEVICE void take() {
    here_ = left_;
    left_ &= left_ - 1;
  }

  /// Every lane looks up a slot.
  MOE_DEVICE void fetch(const PieceWalk& walk) {
    using layout::Slot;
    const int slot_idx = group_ + device::lane_idx();
    bool has_row = false;
    if (slot_idx < params_.num_slots) {
      const int64_t slot = device::load_constant(params_.row_slots +
                                                 walk.token_idx() * params_.num_slots + slot_idx);
      has_row = slot != Slot::kNone;
      if constexpr (kFindsRows)
        if (has_row) {
          const std::byte* const rows =
              device::load(&params_.tables.peers[Slot::rank_idx(slot)].rows);
          row_ = reinterpret_cast<uint64_t>(offset_ptr(rows, Slot::row_idx(slot), row_bytes_)) +
                 static_cast<uint64_t>(walk.offset());
        }
      if constexpr (kWeighted)
        if (has_row)
          weight_ = load_weight(walk, slot_idx);
    }
    left_ = device::ballot(has_row);
  }

  MOE_DEVICE Scalar load_weight(const PieceWalk& walk, int slot_idx) const {
    const int64_t choice = walk.token_idx() * params_.num_topk + slot_idx;
    if constexpr (sizeof(Scalar) == 8)
      if (params_.weight_bytes == 8)
        return device::load_constant(reinterpret_cast<const double*>(params_.weights) + choice);
    return device::load_constant(reinterpret_cast<const float*>(params_.weights) + choice);
  }

  const CombineParams& params_;
  int64_t row_bytes_;
  int group_ = 0;
  uint32_t here_ = 0;  ///< bits of the lane that knows the row and of those that know later ones
  uint32_t left_ = 0;  ///< bits of later ones
  uint64_t row_ = 0;
  Scalar weight_ = 0;
};

/// Part of a piece that a lane has: its units lie kWarpSize units apart, so that a warp reads
/// adjacent bytes.
template <typename Unit>
struct LaneUnits {
  Unit units[kUnitsPerLane];

  /// @param piece  piece of a row in global memory
  MOE_DEVICE void load(const std::byte* piece, int num_units) {
    load_by(piece, num_units, [](const Unit* from) { return device::load(from); });
  }
  /// @param piece      piece of a row in shared memory
  /// @param num_units  number of units; 0 or less for none
  MOE_DEVICE void load_shared(const std::byte* piece, int num_units) {
    load_by(piece, num_units, [](const Unit* from) { return device::load_shared(from); });
  }
  /// Loads a piece of kPieceBytes<Unit>.
  MOE_DEVICE void load_shared(const std::byte* piece) {
    const auto* const from = reinterpret_cast<const Unit*>(piece) + device::lane_idx();
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i)
      units[i] = device::load_shared(from + i * device::kWarpSize);
  }

 private:
  template <typename Load>
  MOE_DEVICE void load_by(const std::byte* piece, int num_units, const Load& load_unit) {
    const auto* const from = reinterpret_cast<const Unit*>(piece) + device::lane_idx();
    const int num_left = num_units - device::lane_idx();
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i)
      units[i] =
          i * device::kWarpSize < num_left ? load_unit(from + i * device::kWarpSize) : Unit{};
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
    auto* const to = reinterpret_cast<Unit*>(piece) + device::lane_idx();
    const int num_left = num_units - device::lane_idx();
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i) {
      if (i * device::kWarpSize >= num_left)
        continue;
      const Unit sum = device::narrow_unit<Number, Unit>(sums_[i]);
      if constexpr (kIsReadSoon)
        device::store(to + i * device::kWarpSize, sum);
      else
        device::store_streaming(to + i * device::kWarpSize, sum);
    }
  }

 private:
  static constexpr int kElements = device::kElementsPerUnit<Number, Unit>;

  Scalar sums_[kUnitsPerLane][kElements] = {};
};

/// Calls @p function(offset, num_units) for the pieces of a row, one after another.
template <typename Unit, typename Function>
MOE_DEVICE void for_pieces(int64_t row_bytes, const Function& function) {
#pragma unroll 1
  for (int64_t offset = 0; offset < row_bytes; offset += kPieceBytes<Unit>) {
    const int64_t left = row_bytes - offset;
    const int64_t bytes = left < kPieceBytes<Unit> ? left : kPieceBytes<Unit>;
    function(offset, static_cast<int>(bytes / static_cast<int64_t>(sizeof(Unit))));
  }
}

}  // namespace moe::kernels
