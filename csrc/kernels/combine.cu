#include "kernels/combine.h"

#include "kernels/combine_rows.h"
#include "kernels/finish.h"

namespace moe::kernels {

namespace {

using device::Bytes16;

/// A piece is added in parts, each of which lies in registers.
constexpr int kPartsPerPiece = 2;
constexpr int64_t kPartBytes = kPieceBytes<Bytes16>;
/// A bulk copy of so many bytes costs as much to issue as one of half.
constexpr int64_t kMostPieceBytes = kPartsPerPiece * kPartBytes;

// Shared memory of a block of w warps, with bulk copies:
//   [0, 4 * w)          scratch of the block, at least two words
//   then per warp       kWarpBytes: stages of a piece each, as many as fit, at a multiple of 128
//   then per warp       an mbarrier per stage, kMaxStages of them
struct SharedMap {
  /// Two of three pieces are under way while one is added: 128 KiB in a block of
  /// kMaxCombineThreads, which hide the latency of rows of peers.
  static constexpr int64_t kWarpBytes = 3 * kMostPieceBytes;
  static constexpr int kMaxStages = 8;

  int64_t stages_offset;
  int64_t mbarriers_offset;
  int64_t bytes;

  static MOE_HOST_DEVICE SharedMap make(int num_warps) {
    SharedMap map{};
    map.stages_offset = round_up(scratch_bytes(num_warps), 128);
    map.mbarriers_offset = map.stages_offset + num_warps * kWarpBytes;
    map.bytes = map.mbarriers_offset +
                num_warps * kMaxStages * static_cast<int64_t>(sizeof(device::MBarrier));
    return map;
  }
  static MOE_HOST_DEVICE int64_t scratch_bytes(int num_warps) {
    return (num_warps > 2 ? num_warps : 2) * int64_t{4};
  }
  static MOE_DEVICE int num_stages(int32_t piece_bytes) {
    const int num_stages = static_cast<int32_t>(kWarpBytes) / piece_bytes;
    return num_stages < kMaxStages ? num_stages : kMaxStages;
  }
};

/// Stages of one warp: pieces of rows on their way from where the experts put them.
///
/// Lane 0 issues the bulk copies. A stage is filled again once all lanes have read it; the phase of
/// its mbarrier flips with every filling.
template <typename Number>
class StagedRows {
 public:
  /// @param walk  at its beginning
  MOE_DEVICE StagedRows(const CombineParams& params, int64_t row_bytes, const PieceWalk& walk)
      : walk_(walk),
        rows_(params, row_bytes),
        stage_bytes_(params.pieces.bytes),
        num_stages_(SharedMap::num_stages(params.pieces.bytes)) {
    std::byte* const shared = device::shared_memory();
    const SharedMap map = SharedMap::make(device::num_warps());
    stages_ = shared + map.stages_offset + device::warp_idx() * SharedMap::kWarpBytes;
    mbarriers_ = reinterpret_cast<device::MBarrier*>(shared + map.mbarriers_offset) +
                 device::warp_idx() * SharedMap::kMaxStages;
    if (device::lane_idx() == 0) {
#pragma unroll 1
      for (int stage = 0; stage < num_stages_; ++stage)
        device::init_mbarrier(mbarriers_ + stage, 1);
      device::fence_mbarrier_init();
      // Rows were acquired by loads, in the kernel before or by the caller.
      device::fence_proxy_async();
    }
    device::sync_warp();
    if (!walk_.has_ended())
      rows_.begin(walk_);
#pragma unroll 1
    for (int stage = 0; stage < num_stages_; ++stage)
      fill(stage);
  }

  /// Waits for the next piece. @return where it lies until release().
  MOE_DEVICE const std::byte* await() const {
    while (!device::try_wait(mbarriers_ + stage_, parity_)) {
    }
    return stages_ + stage_ * stage_bytes_;
  }

  /// This lane has read the piece; once all have, its stage is filled again.
  MOE_DEVICE void release() {
    device::sync_warp();
    fill(stage_);
    stage_ = stage_ + 1 < num_stages_ ? stage_ + 1 : 0;
    parity_ ^= stage_ == 0 ? 1 : 0;
  }

 private:
  /// Begins to load the piece behind the last that was begun, if there is one, into a free stage.
  MOE_DEVICE void fill(int stage) {
    while (!walk_.has_ended() && !rows_.next(walk_)) {
      walk_.advance();
      if (!walk_.has_ended())
        rows_.begin(walk_);
    }
    if (walk_.has_ended())
      return;
    const std::byte* const from = rows_.row();
    if (device::lane_idx() == 0) {
      const auto bytes = static_cast<uint32_t>(walk_.bytes());
      device::MBarrier* const mbarrier = mbarriers_ + stage;
      device::arrive_expect(mbarrier, bytes);
      device::bulk_load(stages_ + stage * stage_bytes_, from, bytes, mbarrier);
    }
  }

  PieceWalk walk_;
  TokenRows<Number, false, true> rows_;
  std::byte* stages_;
  device::MBarrier* mbarriers_;
  int stage_bytes_;
  int num_stages_;
  int stage_ = 0;  ///< of the piece that is taken next
  uint32_t parity_ = 0;
};

/// Sums with rows that come by bulk copy: stages are filled for the next rows, of this token or of
/// the next, while a row is added.
template <typename Number, bool kWeighted>
MOE_DEVICE void sum_staged(const CombineParams& params, int64_t row_bytes) {
  constexpr int kUnitsPerPart = kPartBytes / static_cast<int64_t>(sizeof(Bytes16));
  static_assert(kPartsPerPiece == 2);
  PieceWalk walk(params, params.pieces);
  StagedRows<Number> staged(params, row_bytes, walk);
  TokenRows<Number, kWeighted, false> rows(params, row_bytes);
  ProgressReporter progress(params.buffer);
#pragma unroll 1
  for (; !walk.has_ended(); walk.advance()) {
    const int num_units = walk.bytes() / static_cast<int>(sizeof(Bytes16));
    const int num_second = num_units - kUnitsPerPart;
    LaneSums<Number, Bytes16> first_sums;
    LaneSums<Number, Bytes16> second_sums;
#pragma unroll 1
    for (rows.begin(walk); rows.next(walk);) {
      const auto weight = rows.weight();
      const std::byte* const piece = staged.await();
      LaneUnits<Bytes16> row;
      row.load_shared(piece, num_units);
      first_sums.template add<kWeighted>(row, weight);
      if (num_second > 0)
        row.load_shared(piece + kPartBytes, num_second);
      staged.release();
      if (num_second > 0)
        second_sums.template add<kWeighted>(row, weight);
    }
    std::byte* const sums = params.sums + walk.token_idx() * row_bytes + walk.offset();
    first_sums.store(sums, num_units);
    if (num_second > 0)
      second_sums.store(sums + kPartBytes, num_second);
    progress.tick();
  }
}

/// Sums with rows that come by loads; those of the next row are under way while a row is added.
/// @param pieces  of at most kPieceBytes<Unit>
template <typename Number, bool kWeighted, typename Unit>
MOE_DEVICE void sum_loaded(const CombineParams& params,
                           int64_t row_bytes,
                           const RowPieces& pieces) {
  PieceWalk walk(params, pieces);
  TokenRows<Number, kWeighted, true> rows(params, row_bytes);
  ProgressReporter progress(params.buffer);
#pragma unroll 1
  for (; !walk.has_ended(); walk.advance()) {
    const int num_units = walk.bytes() / static_cast<int>(sizeof(Unit));
    LaneSums<Number, Unit> sums;
    LaneUnits<Unit> coming;
    rows.begin(walk);
    bool has_row = rows.next(walk);
    if (has_row)
      coming.load(rows.row(), num_units);
#pragma unroll 1
    while (has_row) {
      const LaneUnits<Unit> row = coming;
      const auto weight = rows.weight();
      has_row = rows.next(walk);
      if (has_row)
        coming.load(rows.row(), num_units);
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
    using Bits = typename Number::Bits;
    constexpr int64_t kBytes = kPieceBytes<Bits>;
    const int64_t num_pieces = (row_bytes + kBytes - 1) / kBytes;
    const RowPieces pieces{static_cast<int32_t>(num_pieces),
                           kBytes,
                           static_cast<int32_t>(row_bytes - (num_pieces - 1) * kBytes)};
    sum_loaded<Number, kWeighted, Bits>(params, row_bytes, pieces);
    return;
  }
  if constexpr (device::kHasBulkCopies) {
    if (params.is_plain == 0) {
      sum_staged<Number, kWeighted>(params, row_bytes);
      return;
    }
  }
  sum_loaded<Number, kWeighted, Bytes16>(params, row_bytes, params.pieces);
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
  if (params.num_topk == 0)
    return;
  const bool is_by_rank = params.arrangement.is_by_rank();
#pragma unroll 1
  for (PairWalk choices(static_cast<uint32_t>(device::block_idx() * device::num_threads() +
                                              device::thread_idx()),
                        static_cast<uint32_t>(device::num_blocks() * device::num_threads()),
                        static_cast<uint32_t>(params.num_topk));
       choices.outer() < params.num_tokens;
       choices.advance()) {
    const int64_t token_idx = choices.outer();
    const auto k = static_cast<int>(choices.inner());
    const int64_t choice = token_idx * params.num_topk + k;
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
MOE_KERNEL_OF(kMaxCombineThreads)
void combine(const CombineParams params) {
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

/// Pieces of one size, of whole rounds of a warp, such that warps are done soonest that take them
/// in turn: few tokens are cut smaller, so that each warp has one.
/// @param most_bytes  of a piece
RowPieces cut_rows(int64_t row_bytes, int64_t most_bytes, int64_t num_tokens, int64_t num_warps) {
  constexpr int64_t kRoundBytes = device::kWarpSize * static_cast<int64_t>(sizeof(Bytes16));
  /// What a warp spends on a piece whatever its size, finding the rows above all.
  constexpr int64_t kBytesOfAPiece = kRoundBytes;
  /// Beyond, the last turn does not count.
  constexpr int64_t kManyTurns = 8;
  const auto divide_up = [](int64_t value, int64_t by) { return (value + by - 1) / by; };
  RowPieces best;
  int64_t least_cost = INT64_MAX;
  for (int64_t num_pieces = divide_up(row_bytes, most_bytes);
       num_pieces <= divide_up(row_bytes, kRoundBytes);
       ++num_pieces) {
    const int64_t bytes = round_up(divide_up(row_bytes, num_pieces), kRoundBytes);
    const int64_t num_cut = divide_up(row_bytes, bytes);
    const int64_t num_turns = divide_up(num_tokens * num_cut, num_warps);
    const int64_t cost = num_turns * (bytes + kBytesOfAPiece);
    if (cost < least_cost) {
      least_cost = cost;
      best = {static_cast<int32_t>(num_cut),
              static_cast<int32_t>(bytes),
              static_cast<int32_t>(row_bytes - (num_cut - 1) * bytes)};
    }
    if (num_turns >= kManyTurns)
      break;
  }
  return best;
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
  const int64_t num_warps = int64_t{launch.num_blocks} * (launch.num_threads / device::kWarpSize);
  CombineParams cut = params;
  if (cut.row_slots == nullptr)
    cut.row_slots = cut.slots;
  if (params.hidden > 0)
    cut.pieces = cut_rows(params.hidden * element_bytes(params.dtype),
                          params.is_plain != 0 ? kPartBytes : kMostPieceBytes,
                          params.num_tokens,
                          num_warps);
  switch (params.dtype) {
    case DType::kBFloat16:
      return launch_combine_of<device::BFloat16>(launch, cut);
    case DType::kFloat16:
      return launch_combine_of<device::Float16>(launch, cut);
    case DType::kFloat32:
    case DType::kBytes:  // no rows, only weights
      return launch_combine_of<device::Float32>(launch, cut);
    case DType::kFloat64:
      return launch_combine_of<device::Float64>(launch, cut);
  }
}

}  // namespace moe::kernels
