// The pipelines of bulk copies as kernels of one warp, for a static checker
// (test_bulk_pipelines.py): how many pieces there are is known to the compiler, and nothing depends
// on what memory holds.

#include <cstdint>

#include "device/row_copy.h"
#include "kernels/staged_copies.h"
#include "kernels/staged_rows.h"

namespace {

using namespace moe;
using device::Bytes16;

constexpr uint32_t kNumPieces = MOE_NUM_PIECES;
constexpr int kStageBytes = 512;  // 16 of every lane

/// Pieces of one token whose rows all have one, as many as there are stages and more.
struct OneToken {
  bool is_over = false;

  MOE_DEVICE bool has_ended() const { return is_over; }
  MOE_DEVICE void advance() { is_over = true; }
  MOE_DEVICE int32_t bytes() const { return kStageBytes; }
};

/// Every row is known to another lane.
struct SuccessiveRows {
  const std::byte* rows;
  uint32_t num_taken = 0;

  MOE_DEVICE void begin(const OneToken& /*token*/) {}
  MOE_DEVICE bool next(const OneToken& /*token*/) { return num_taken++ < kNumPieces; }
  MOE_DEVICE bool is_known_here() const {
    return num_taken <= kNumPieces && num_taken - 1 == static_cast<uint32_t>(device::lane_idx());
  }
  MOE_DEVICE const std::byte* known_row() const { return rows + device::lane_idx() * kStageBytes; }
};

MOE_DEVICE void store_own(std::byte* to, const std::byte* stage) {
  const int lane = device::lane_idx();
  device::store(reinterpret_cast<Bytes16*>(to) + lane,
                device::load_shared(reinterpret_cast<const Bytes16*>(stage) + lane));
}

}  // namespace

/// dispatch: all lanes read a stage.
extern "C" __global__ void stage_ring(const std::byte* source, std::byte* target) {
  constexpr int kNumStages = 3;
  std::byte* const memory = device::shared_memory();
  device::StageRing<kNumStages> ring(
      memory, kStageBytes, reinterpret_cast<device::MBarrier*>(memory + kNumStages * kStageBytes));
  ring.load(0, source, kStageBytes);
#pragma unroll
  for (uint32_t piece = 0; piece < kNumPieces; ++piece) {
    if (piece + 1 < kNumPieces)
      ring.load(piece + 1, source + (piece + 1) * kStageBytes, kStageBytes);
    ring.await(piece);
    store_own(target + piece * kStageBytes, ring.stage(piece));
    device::commit_bulk_stores();
  }
}

/// receive_copies: one lane awaits a stage and stores from it.
extern "C" __global__ void stage_ring_of_one_lane(const std::byte* source, std::byte* target) {
  constexpr int kNumStages = 3;
  std::byte* const memory = device::shared_memory();
  device::StageRing<kNumStages> ring(
      memory, kStageBytes, reinterpret_cast<device::MBarrier*>(memory + kNumStages * kStageBytes));
  ring.load(0, source, kStageBytes);
#pragma unroll
  for (uint32_t piece = 0; piece < kNumPieces; ++piece) {
    if (piece + 1 < kNumPieces)
      ring.load(piece + 1, source + (piece + 1) * kStageBytes, kStageBytes);
    if (device::lane_idx() == 0) {
      ring.await(piece);
      device::bulk_store(target + piece * kStageBytes, ring.stage(piece), kStageBytes);
      device::commit_bulk_stores();
    }
  }
  device::await_bulk_stores<0>();
}

/// combine: rows are read by all lanes, each loaded by the lane that knows it.
extern "C" __global__ void staged_rows(const std::byte* source, std::byte* target) {
  constexpr kernels::RowPieces kPieces{1, kStageBytes, kStageBytes, 3};
  kernels::StagedRows staged(OneToken{}, SuccessiveRows{source}, kPieces);
#pragma unroll
  for (uint32_t piece = 0; piece < kNumPieces; ++piece) {
    const std::byte* const stage = staged.await();
    store_own(target + piece * kStageBytes, stage);
    staged.release();
  }
}

/// strided_copies: one lane does it all.
extern "C" __global__ void staged_copies(const std::byte* source, std::byte* target) {
  kernels::StagedCopies staged;
#pragma unroll
  for (uint32_t piece = 0; piece < kNumPieces; ++piece)
    staged.push(source + piece * kStageBytes, target + piece * kStageBytes, kStageBytes);
  staged.finish();
}
