#include "kernels/combine.h"

#include <algorithm>

#include "kernels/combine_rows.h"
#include "kernels/finish.h"
#include "kernels/staged_rows.h"

namespace moe::kernels {

namespace {

using device::Bytes16;

/// Sums with rows that come by bulk copy: stages are filled for the next rows, of this token or of
/// the next, while a row is added.
template <typename Number, bool kWeighted>
MOE_DEVICE void sum_staged(const CombineParams& params, int64_t row_bytes) {
  constexpr int kUnitsPerPart = kPartBytes / static_cast<int64_t>(sizeof(Bytes16));
  static_assert(kPartsPerPiece == 2);
  PieceWalk walk(params, params.pieces);
  StagedRows staged(walk, TokenRows<Number, false, true>(params, row_bytes), params.pieces);
  TokenRows<Number, kWeighted, false> rows(params, row_bytes);
  ProgressReporter progress(params.buffer);
#pragma unroll 1
  for (; !walk.has_ended(); walk.advance()) {
    const int num_units = walk.bytes() / static_cast<int>(sizeof(Bytes16));
    const int num_second = num_units - kUnitsPerPart;
    LaneSums<Number, Bytes16> first_sums;
    LaneSums<Number, Bytes16> second_sums;
    rows.for_each(walk, [&] {
      const auto weight = rows.weight();
      const std::byte* const piece = staged.await();
      LaneUnits<Bytes16> row;
      if (num_second == kUnitsPerPart) {
        row.load_shared(piece);
        first_sums.template add<kWeighted>(row, weight);
        row.load_shared(piece + kPartBytes);
      } else {
        row.load_shared(piece, num_units);
        first_sums.template add<kWeighted>(row, weight);
        row.load_shared(piece + kPartBytes, num_second);
      }
      staged.release();
      second_sums.template add<kWeighted>(row, weight);
    });
    std::byte* const sums = params.sums + walk.token_idx() * row_bytes + walk.offset();
    first_sums.store(sums, num_units);
    second_sums.store(sums + kPartBytes, num_second);
    progress.tick();
  }
}

/// Sums with rows that come by loads; those of the next row are under way while a row is added.
/// @param pieces  pieces of at most kPieceBytes<Unit>
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

/// Returns whether every row and every sum begins at a multiple of 16 bytes. The same on all lanes.
MOE_DEVICE bool is_aligned(const CombineParams& params, int64_t row_bytes) {
  uint64_t bits = static_cast<uint64_t>(row_bytes) | reinterpret_cast<uint64_t>(params.sums);
  for (int rank_idx = device::lane_idx(); rank_idx < params.buffer.num_ranks;
       rank_idx += device::kWarpSize) {
    const Peer* const peer = params.tables.peers + rank_idx;
    if (device::load(&peer->is_sent_to) != 0)
      bits |= reinterpret_cast<uint64_t>(device::load(&peer->rows));
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
                           static_cast<int32_t>(row_bytes - (num_pieces - 1) * kBytes),
                           0};
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
          device::load(&params.tables.peers[Slot::rank_idx(slot)].weights);
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
  device::await_prerequisites();
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
/// @param most_bytes  most bytes of a piece
RowPieces cut_rows(int64_t row_bytes, int64_t most_bytes, int64_t num_tokens, int64_t num_warps) {
  constexpr int64_t kRoundBytes = device::kWarpSize * static_cast<int64_t>(sizeof(Bytes16));
  /// Cost of a piece to a warp whatever its size, finding the rows above all.
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
              static_cast<int32_t>(row_bytes - (num_cut - 1) * bytes),
              CombineSharedMap::num_stages(bytes)};
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
  return static_cast<size_t>(is_staged ? CombineSharedMap::make(num_warps).bytes
                                       : CombineSharedMap::scratch_bytes(num_warps));
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
