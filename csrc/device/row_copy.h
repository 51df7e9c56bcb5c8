#pragma once

#include <cstdint>

#include "device/primitives.h"
#include "device/warp.h"

// Copies of rows by a warp: by bulk copies through stages in shared memory, or by loads
// and stores in the widest unit that addresses and sizes allow.

namespace moe::device {

/// Stages of one warp, filled by bulk copies and emptied in the same order. An mbarrier each.
///
/// Lane 0 issues the loads, any lane stores. Piece j, counted from 0, lies in stage j % kNumStages;
/// a stage is filled again once the stores of what was in it have read it, each lane's its own.
template <int kNumStages>
class StageRing {
  static_assert(kNumStages >= 2, "loads and stores overlap");

 public:
  /// All lanes of the warp call. @param stages, barriers  shared memory
  MOE_DEVICE StageRing(std::byte* stages, int32_t stage_bytes, MBarrier* barriers)
      : stages_(stages), stage_bytes_(stage_bytes), barriers_(barriers) {
    if (lane_idx() == 0) {
      for (int i = 0; i < kNumStages; ++i)
        init_mbarrier(barriers + i, 1);
      fence_mbarrier_init();
    }
    sync_warp();
  }

  static MOE_DEVICE int stage_of(uint32_t piece) { return static_cast<int>(piece % kNumStages); }
  MOE_DEVICE std::byte* stage(uint32_t piece) const {
    return stages_ + stage_of(piece) * stage_bytes_;
  }

  /// All lanes of the warp call, at most one piece ahead of what was stored; every lane has
  /// committed every piece before, with stores or none.
  MOE_DEVICE void load(uint32_t piece, const std::byte* source, uint32_t bytes) {
    await_bulk_reads<kNumStages - 2>();
    sync_warp();
    if (lane_idx() != 0)
      return;
    MBarrier* const barrier = barriers_ + stage_of(piece);
    arrive_expect(barrier, bytes);
    bulk_load(stage(piece), source, bytes, barrier);
  }

  /// Any lane that is to read the stage, or to store from it.
  MOE_DEVICE void await(uint32_t piece) {
    const uint32_t parity = piece / kNumStages % 2;
    while (!try_wait(barriers_ + stage_of(piece), parity))
      pause(kPauseNs);
  }

 private:
  static constexpr uint32_t kPauseNs = 32;

  std::byte* stages_;
  int32_t stage_bytes_;
  MBarrier* barriers_;
};

/// The widest unit, up to 16 bytes, that divides @p bits: addresses and sizes or-ed together.
MOE_DEVICE int widest_unit(uint64_t bits) {
  return static_cast<int>((bits | 16) & (~(bits | 16) + 1));
}

/// Calls @p function(T{}) with the unsigned integer (or Bytes16) of @p unit bytes.
template <typename Function>
MOE_DEVICE void with_unit(int unit, const Function& function) {
  switch (unit) {
    case 16:
      return function(Bytes16{});
    case 8:
      return function(uint64_t{});
    case 4:
      return function(uint32_t{});
    case 2:
      return function(uint16_t{});
    default:
      return function(uint8_t{});
  }
}

/// Lanes copy a row to several places, reading it once. All lanes of the warp call.
/// @param unit      bytes that source, places and @p bytes are multiples of
/// @param place_of  place_of(i), the i-th address or null
template <typename PlaceOf>
MOE_DEVICE void copy_row(
    const std::byte* source, int64_t bytes, int unit, int num_places, const PlaceOf& place_of) {
  with_unit(unit, [&](auto kind) {
    using Unit = decltype(kind);
    constexpr int kUnitsPerLane = 4;  // loads in flight
    const auto* const from = reinterpret_cast<const Unit*>(source);
    const int64_t num_units = bytes / static_cast<int64_t>(sizeof(Unit));
#pragma unroll 1
    for (int64_t first = lane_idx(); first < num_units; first += kUnitsPerLane * kWarpSize) {
      Unit units[kUnitsPerLane] = {};
#pragma unroll
      for (int i = 0; i < kUnitsPerLane; ++i)
        if (first + i * kWarpSize < num_units)
          units[i] = device::load(from + first + i * kWarpSize);
#pragma unroll 1
      for (int place_idx = 0; place_idx < num_places; ++place_idx) {
        auto* const to = reinterpret_cast<Unit*>(place_of(place_idx));
        if (to == nullptr)
          continue;
#pragma unroll
        for (int i = 0; i < kUnitsPerLane; ++i)
          if (first + i * kWarpSize < num_units)
            device::store(to + first + i * kWarpSize, units[i]);
      }
    }
  });
}

/// Lanes copy words of @p unit bytes that lie so many bytes apart. All lanes of the warp call.
MOE_DEVICE void copy_strided(std::byte* to,
                             int64_t to_step,
                             const std::byte* from,
                             int64_t from_step,
                             int num_words,
                             int unit) {
  with_unit(unit, [&](auto kind) {
    using Word = decltype(kind);
#pragma unroll 1
    for (int i = lane_idx(); i < num_words; i += kWarpSize)
      device::store(reinterpret_cast<Word*>(to + i * to_step),
                    device::load(reinterpret_cast<const Word*>(from + i * from_step)));
  });
}

/// Lanes set every byte to @p value. All lanes of the warp call.
MOE_DEVICE_CALLED void fill_bytes(std::byte* to, int64_t bytes, uint8_t value) {
  const int unit = widest_unit(reinterpret_cast<uint64_t>(to) | static_cast<uint64_t>(bytes));
  const uint32_t word = value * 0x01010101u;
  const Bytes16 pattern{{word, word, word, word}};
  with_unit(unit, [&](auto kind) {
    using Unit = decltype(kind);
    Unit unit_value;
    __builtin_memcpy(&unit_value, &pattern, sizeof(Unit));
#pragma unroll 1
    for (int64_t i = lane_idx(); i < bytes / static_cast<int64_t>(sizeof(Unit)); i += kWarpSize)
      device::store(reinterpret_cast<Unit*>(to) + i, unit_value);
  });
}

}  // namespace moe::device
