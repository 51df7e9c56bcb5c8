#include "kernels/combine.h"

#include "kernels/combine_rows.h"
#include "kernels/finish.h"

namespace moe::kernels {

namespace {

using device::Bytes16;

// Shared memory of a block of w warps, with bulk copies:
//   [0, 4 * w)          scratch of the block, at least two words
//   then per warp       stages of kPieceBytes<Bytes16>, at a multiple of 128
//   then per warp       an mbarrier per stage
struct SharedMap {
  /// 128 KiB under way in a block of kMaxCombineThreads hide the latency of rows of peers.
  static constexpr int kNumStages = 4;

  int64_t stages_offset;
  int64_t mbarriers_offset;
  int64_t bytes;

  static MOE_HOST_DEVICE SharedMap make(int num_warps) {
    const int64_t num_stages = int64_t{num_warps} * kNumStages;
    SharedMap map{};
    map.stages_offset = round_up(scratch_bytes(num_warps), 128);
    map.mbarriers_offset = map.stages_offset + num_stages * kPieceBytes<Bytes16>;
    map.bytes = map.mbarriers_offset + num_stages * static_cast<int64_t>(sizeof(device::MBarrier));
    return map;
  }
  static MOE_HOST_DEVICE int64_t scratch_bytes(int num_warps) {
    return (num_warps > 2 ? num_warps : 2) * int64_t{4};
  }
};

/// Stages of one warp: pieces of rows on their way from where the experts put them.
///
/// Lane 0 issues the bulk copies. A stage is filled again once all lanes have read it; the phase of
/// its mbarrier flips with every filling.
template <typename Number>
class StagedRows {
 public:
  MOE_DEVICE StagedRows(const CombineParams& params, int64_t row_bytes)
      : walk_(params, row_bytes, kPieceBytes<Bytes16>), rows_(params, row_bytes) {
    std::byte* const shared = device::shared_memory();
    const SharedMap map = SharedMap::make(device::num_warps());
    const int first = device::warp_idx() * kNumStages;
    stages_ = shared + map.stages_offset + first * kPieceBytes<Bytes16>;
    mbarriers_ = reinterpret_cast<device::MBarrier*>(shared + map.mbarriers_offset) + first;
    if (device::lane_idx() == 0) {
      for (int stage = 0; stage < kNumStages; ++stage)
        device::init_mbarrier(mbarriers_ + stage, 1);
      device::fence_mbarrier_init();
      // Rows were acquired by loads, in the kernel before or by the caller.
      device::fence_proxy_async();
    }
    device::sync_warp();
    if (!walk_.has_ended())
      rows_.begin(walk_.token_idx());
    for (int stage = 0; stage < kNumStages; ++stage)
      fill();
  }

  /// Takes the next piece into registers and fills its stage again.
  MOE_DEVICE void take(LaneUnits<Bytes16>* piece, int num_units) {
    while (!device::try_wait(mbarriers_ + taken_stage_, parity_)) {
    }
    piece->load(stages_ + taken_stage_ * kPieceBytes<Bytes16>, num_units);
    device::sync_warp();
    fill();
    taken_stage_ = (taken_stage_ + 1) % kNumStages;
    parity_ ^= taken_stage_ == 0 ? 1 : 0;
  }

 private:
  /// Begins to load the piece behind the last that was begun, if there is one.
  MOE_DEVICE void fill() {
    while (!walk_.has_ended() && !rows_.next()) {
      walk_.advance();
      if (!walk_.has_ended())
        rows_.begin(walk_.token_idx());
    }
    if (walk_.has_ended())
      return;
    const std::byte* const from = rows_.row() + walk_.offset();
    if (device::lane_idx() == 0) {
      const auto bytes = static_cast<uint32_t>(walk_.bytes());
      device::MBarrier* const mbarrier = mbarriers_ + filled_stage_;
      device::arrive_expect(mbarrier, bytes);
      device::bulk_load(stages_ + filled_stage_ * kPieceBytes<Bytes16>, from, bytes, mbarrier);
    }
    filled_stage_ = (filled_stage_ + 1) % kNumStages;
  }

  static constexpr int kNumStages = SharedMap::kNumStages;

  PieceWalk walk_;
  TokenRows<Number, false> rows_;
  std::byte* stages_;
  device::MBarrier* mbarriers_;
  int filled_stage_ = 0;
  int taken_stage_ = 0;
  uint32_t parity_ = 0;
};

/// Sums with rows that come by bulk copy: stages are filled for the next rows, of this token or of
/// the next, while a row is added.
template <typename Number, bool kWeighted>
MOE_DEVICE void sum_staged(const CombineParams& params, int64_t row_bytes) {
  StagedRows<Number> staged(params, row_bytes);
  TokenRows<Number, kWeighted> rows(params, row_bytes);
  ProgressShower progress(params.buffer);
  for (PieceWalk walk(params, row_bytes, kPieceBytes<Bytes16>); !walk.has_ended(); walk.advance()) {
    const auto num_units = static_cast<int>(walk.bytes() / static_cast<int64_t>(sizeof(Bytes16)));
    LaneSums<Number, Bytes16> sums;
    for (rows.begin(walk.token_idx()); rows.next();) {
      LaneUnits<Bytes16> row;
      staged.take(&row, num_units);
      sums.template add<kWeighted>(row, rows.weight());
    }
    sums.store(params.sums + walk.token_idx() * row_bytes + walk.offset(), num_units);
    progress.tick();
  }
}

/// Sums with rows that come by loads; those of the next row are under way while a row is added.
template <typename Number, bool kWeighted, typename Unit>
MOE_DEVICE void sum_loaded(const CombineParams& params, int64_t row_bytes) {
  TokenRows<Number, kWeighted> rows(params, row_bytes);
  ProgressShower progress(params.buffer);
  for (PieceWalk walk(params, row_bytes, kPieceBytes<Unit>); !walk.has_ended(); walk.advance()) {
    const auto num_units = static_cast<int>(walk.bytes() / static_cast<int64_t>(sizeof(Unit)));
    LaneSums<Number, Unit> sums;
    LaneUnits<Unit> coming;
    rows.begin(walk.token_idx());
    bool has_row = rows.next();
    if (has_row)
      coming.load(rows.row() + walk.offset(), num_units);
    while (has_row) {
      const LaneUnits<Unit> row = coming;
      const auto weight = rows.weight();
      has_row = rows.next();
      if (has_row)
        coming.load(rows.row() + walk.offset(), num_units);
      sums.template add<kWeighted>(row, weight);
    }
    sums.store(params.sums + walk.token_idx() * row_bytes + walk.offset(), num_units);
    progress.tick();
  }
}

/// Whether every row and every sum begins at a multiple of 16 bytes. The same on all lanes.
MOE_DEVICE bool is_aligned(const CombineParams& params, int64_t row_bytes) {
  uint64_t bits = static_cast<uint64_t>(row_bytes) | reinterpret_cast<uint64_t>(params.sums);
  for (int rank_idx = device::lane_idx(); rank_idx < params.buffer.num_ranks;
       rank_idx += device::kWarpSize) {
    const Peer* const peer = params.tables.peers + rank_idx;
    if (device::load_constant(&peer->is_sent_to) != 0)
      bits |= reinterpret_cast<uint64_t>(device::load_constant(&peer->rows));
  }
  return device::all(bits % sizeof(Bytes16) == 0);
}

template <typename Number, bool kWeighted>
MOE_DEVICE void sum_rows(const CombineParams& params) {
  const int64_t row_bytes = params.hidden * static_cast<int64_t>(sizeof(typename Number::Bits));
  if (row_bytes == 0)
    return;
  if (!is_aligned(params, row_bytes)) {
    sum_loaded<Number, kWeighted, typename Number::Bits>(params, row_bytes);
    return;
  }
  if constexpr (device::kHasBulkCopies) {
    if (params.is_plain == 0) {
      sum_staged<Number, kWeighted>(params, row_bytes);
      return;
    }
  }
  sum_loaded<Number, kWeighted, Bytes16>(params, row_bytes);
}

/// Slot of the row that carries choice @p k of a token, rank-major: the one on the owner's rank.
MOE_DEVICE int64_t slot_of_choice(const CombineParams& params, int64_t token_idx, int k) {
  using layout::Slot;
  const int64_t expert_idx =
      device::load_constant(params.topk_idx + token_idx * params.num_topk + k);
  if (expert_idx < 0)
    return Slot::kNone;
  const int owner = device::load_constant(params.buffer.expert_rank + expert_idx);
  for (int i = 0; i < params.num_slots; ++i) {
    const int64_t slot = device::load_constant(params.slots + token_idx * params.num_slots + i);
    if (slot != Slot::kNone && Slot::rank_idx(slot) == owner)
      return slot;
  }
  return Slot::kNone;
}

/// Weights of one choice after another, as they lie at the rows' owners; 0 where no row went.
template <typename Weight>
MOE_DEVICE void pull_weights(const CombineParams& params) {
  using layout::Slot;
  const bool is_by_rank = params.arrangement.is_by_rank();
  const int64_t num_choices = params.num_tokens * params.num_topk;
  const int64_t step = static_cast<int64_t>(device::num_blocks()) * device::num_threads();
  for (int64_t choice =
           static_cast<int64_t>(device::block_idx()) * device::num_threads() + device::thread_idx();
       choice < num_choices;
       choice += step) {
    const int64_t token_idx = choice / params.num_topk;
    const auto k = static_cast<int>(choice % params.num_topk);
    const int64_t slot = is_by_rank ? slot_of_choice(params, token_idx, k)
                                    : device::load_constant(params.slots + choice);
    Weight weight = 0;
    if (slot != Slot::kNone) {
      const std::byte* const weights =
          device::load_constant(&params.tables.peers[Slot::rank_idx(slot)].weights);
      const int64_t weight_idx =
          is_by_rank ? Slot::row_idx(slot) * params.num_recv_topk + k : Slot::row_idx(slot);
      weight = device::load(reinterpret_cast<const Weight*>(weights) + weight_idx);
    }
    device::store(reinterpret_cast<Weight*>(params.pulled) + choice, weight);
  }
}

// Grid: any number of blocks; a warp takes a piece of the sum of a token at a time.
// Protocol: the exchange in front of this kernel acquired the rows of every peer. Rows are read
//   until the blocks have counted themselves in finish(); its done flags hand them back to their
//   owners, and it waits until the peers have handed back this rank's own.
// Example: 1 warp, 2 stages, tokens with slots [a, b] and [c, none], rows of one piece. The stages
//   get a and b; a is added while b comes, then its stage gets c; b is added, the first sum stored.
template <typename Number, bool kWeighted>
MOE_KERNEL void combine(const CombineParams params) {
  if (has_left(params.buffer) || device::load(params.tables.may_move) == 0)
    return;
  auto* const scratch = reinterpret_cast<int32_t*>(device::shared_memory());
  sum_rows<Number, kWeighted>(params);
  if (params.pulled_bytes == 8)
    pull_weights<uint64_t>(params);
  else if (params.pulled_bytes == 4)
    pull_weights<uint32_t>(params);
  finish(params.buffer, params.tables, layout::Operation::kCombine, scratch);
}

template <typename Number>
void launch_combine_of(const device::Launch& launch, const CombineParams& params) {
  if (params.weights != nullptr)
    device::launch(&combine<Number, true>, launch, params);
  else
    device::launch(&combine<Number, false>, launch, params);
}

}  // namespace

size_t combine_shared_bytes(const CombineParams& params, int num_threads) {
  const int num_warps = num_threads / device::kWarpSize;
  const bool is_staged = params.is_plain == 0 && params.hidden > 0;
  return static_cast<size_t>(is_staged ? SharedMap::make(num_warps).bytes
                                       : SharedMap::scratch_bytes(num_warps));
}

void launch_combine(const device::Launch& launch, const CombineParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return launch_combine_of<device::BFloat16>(launch, params);
    case DType::kFloat16:
      return launch_combine_of<device::Float16>(launch, params);
    case DType::kFloat32:
    case DType::kBytes:  // no rows, only weights
      return launch_combine_of<device::Float32>(launch, params);
    case DType::kFloat64:
      return launch_combine_of<device::Float64>(launch, params);
  }
}

}  // namespace moe::kernels
