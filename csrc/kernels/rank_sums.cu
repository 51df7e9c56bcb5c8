#include "kernels/rank_sums.h"

#include <algorithm>
#include <climits>

#include "core/error.h"
#include "kernels/combine_rows.h"
#include "kernels/finish.h"
#include "kernels/publish.h"

namespace moe::kernels {

namespace {

/// Lists the first slot of one token on each rank, ranks ascending, then none.
/// @param alone_rank  added to the rank of a slot that has no other on its rank
MOE_DEVICE void list_first_slots(const int64_t* slots,
                                 int num_slots,
                                 int alone_rank,
                                 int64_t* first_slots) {
  using layout::Slot;
  int last_rank = -1;
  int num_listed = 0;
#pragma unroll 1
  for (bool has_more = true; has_more;) {
    int next_rank = INT_MAX;
    int64_t next_slot = Slot::kNone;
    bool is_alone = true;
#pragma unroll 1
    for (int i = 0; i < num_slots; ++i) {
      const int64_t slot = device::load_constant(slots + i);
      const int rank_idx = slot == Slot::kNone ? INT_MAX : Slot::rank_idx(slot);
      if (rank_idx > last_rank && rank_idx < next_rank) {
        next_rank = rank_idx;
        next_slot = slot;
        is_alone = true;
      } else if (rank_idx == next_rank) {
        is_alone = false;
      }
    }
    has_more = next_slot != Slot::kNone;
    if (has_more)
      device::store(first_slots + num_listed++,
                    next_slot + (is_alone ? Slot::pack(alone_rank, 0) : 0));
    last_rank = next_rank;
  }
#pragma unroll 1
  for (; num_listed < num_slots; ++num_listed)
    device::store(first_slots + num_listed, int64_t{Slot::kNone});
}

/// 1 where none is applied: a product with it is the row.
template <typename Scalar>
MOE_DEVICE Scalar load_request_weight(const RankRequestsParams& params, int64_t i) {
  if (params.weights == nullptr)
    return Scalar{1};
  if constexpr (sizeof(Scalar) == 8)
    if (params.weight_bytes == 8)
      return device::load_constant(reinterpret_cast<const double*>(params.weights) + i);
  return device::load_constant(reinterpret_cast<const float*>(params.weights) + i);
}

template <typename Scalar>
MOE_DEVICE void write_requests(const RankRequestsParams& params, const layout::RankSumsMap& map) {
  auto* const slots = reinterpret_cast<int64_t*>(params.window + map.slots_offset);
  auto* const weights = reinterpret_cast<Scalar*>(params.window + map.weights_offset);
  const int64_t num_requests = params.num_tokens * params.num_slots;
  const int64_t first = int64_t{device::block_idx()} * device::num_threads() + device::thread_idx();
  const int64_t step = int64_t{device::num_blocks()} * device::num_threads();
#pragma unroll 1
  for (int64_t i = first; i < num_requests; i += step) {
    device::store(slots + i, device::load_constant(params.slots + i));
    device::store(weights + i, load_request_weight<Scalar>(params, i));
  }
#pragma unroll 1
  for (int64_t token_idx = first; token_idx < params.num_tokens; token_idx += step)
    list_first_slots(params.slots + token_idx * params.num_slots,
                     params.num_slots,
                     params.weights == nullptr ? params.num_ranks : 0,
                     reinterpret_cast<int64_t*>(params.window) + token_idx * params.num_slots);
  if (first == 0) {
    auto* const header =
        reinterpret_cast<layout::RankSumsMap::Header*>(params.window + map.header_offset);
    device::store(&header->num_tokens, params.num_tokens);
    device::store(&header->num_slots, int64_t{params.num_slots});
    device::store(&header->is_weighted, int64_t{params.weights != nullptr});
    store_struct(&header->rows, params.rows);
  }
}

// Grid: any number of blocks, whose threads take slots and tokens in turn. Waits for nobody; the
//   exchange behind it releases what it wrote.
// Example: a token of 4 ranks has slots [2:5, 0:1, 2:3, none] (rank:row) and no weights. Peers read
//   them as they are; its own list is [4:1, 2:5, none, none].
MOE_KERNEL void write_rank_requests(const RankRequestsParams params) {
  const auto map =
      layout::RankSumsMap::make(params.num_tokens, params.num_slots, params.number_bytes);
  if (params.number_bytes == 8)
    write_requests<double>(params, map);
  else
    write_requests<float>(params, map);
}

/// Writes what a rank asks for: its tokens' slots, and their weights.
template <typename Scalar>
struct RankRequests {
  int64_t num_tokens;
  int64_t num_slots;
  bool is_weighted;
  const int64_t* slots;
  const Scalar* weights;

  /// @param sums  sums that the rank offers
  static MOE_DEVICE RankRequests of(const std::byte* sums) {
    const auto* const header = layout::RankSumsMap::header(sums);
    const int64_t num_tokens = device::load(&header->num_tokens);
    const int64_t num_slots = device::load(&header->num_slots);
    const auto map = layout::RankSumsMap::make(num_tokens, num_slots, sizeof(Scalar));
    const std::byte* const window = sums - map.sums_offset;
    return {num_tokens,
            num_slots,
            device::load(&header->is_weighted) != 0,
            reinterpret_cast<const int64_t*>(window + map.slots_offset),
            reinterpret_cast<const Scalar*>(window + map.weights_offset)};
  }
};

/// The rows of one token that lie here, in the order of its slots. A lane knows one slot; all lanes
/// of the warp call.
template <typename Number>
class RankRows {
 public:
  using Scalar = typename Number::Scalar;

  MOE_DEVICE RankRows(const RankSumsParams& params, int64_t row_bytes)
      : params_(params), row_bytes_(row_bytes) {}

  /// Called in front of the first row of a token.
  MOE_DEVICE void begin(const RankRequests<Scalar>& requests, int64_t token_idx) {
    group_ = 0;
    fetch(requests, token_idx);
  }
  /// The same for the token that the rows are of.
  MOE_DEVICE void begin_again(const RankRequests<Scalar>& requests, int64_t token_idx) {
    if (requests.num_slots > device::kWarpSize)
      begin(requests, token_idx);
    else
      left_ = here_;
  }

  /// @return false behind the last row.
  MOE_DEVICE bool next(const RankRequests<Scalar>& requests, int64_t token_idx) {
    while (left_ == 0) {
      group_ += device::kWarpSize;
      if (group_ >= requests.num_slots)
        return false;
      fetch(requests, token_idx);
    }
    lane_ = device::first_bit(left_);
    left_ &= left_ - 1;
    return true;
  }
  /// Bytes from the first row of this rank.
  MOE_DEVICE int64_t offset() const { return device::shuffle(row_idx_, lane_) * row_bytes_; }
  MOE_DEVICE Scalar weight() const { return device::shuffle(weight_, lane_); }

 private:
  MOE_DEVICE void fetch(const RankRequests<Scalar>& requests, int64_t token_idx) {
    using layout::Slot;
    const int64_t i = group_ + device::lane_idx();
    const int64_t request = token_idx * requests.num_slots + i;
    const int64_t slot =
        i < requests.num_slots ? device::load(requests.slots + request) : Slot::kNone;
    const bool is_here = slot != Slot::kNone && Slot::rank_idx(slot) == params_.buffer.rank_idx;
    row_idx_ = Slot::row_idx(slot);
    weight_ = is_here ? device::load(requests.weights + request) : Scalar{0};
    left_ = here_ = device::ballot(is_here);
  }

  const RankSumsParams& params_;
  int64_t row_bytes_;
  int64_t group_ = 0;
  int lane_ = 0;
  uint32_t here_ = 0;  ///< lanes of the group whose slot lies here
  uint32_t left_ = 0;
  int64_t row_idx_ = 0;
  Scalar weight_ = 0;
};

/// Adds for the tokens of all ranks, one token after another; a warp takes them in turn. The loads
/// of the next row are under way while a row is added.
template <typename Number, typename Unit>
MOE_DEVICE void add_for_ranks(const RankSumsParams& params, int64_t row_bytes) {
  RankRows<Number> rows(params, row_bytes);
  ProgressReporter progress(params.buffer);
  const int64_t step = int64_t{device::num_blocks()} * device::num_warps();
  int64_t token_idx = int64_t{device::warp_idx()} * device::num_blocks() + device::block_idx();
  const bool offers_rows =
      device::load_constant(&layout::RankSumsMap::header(params.sums)->rows.bytes) > 0;
#pragma unroll 1
  for (int rank_idx = 0; rank_idx < params.buffer.num_ranks; ++rank_idx) {
    const Peer* const peer = params.tables.peers + rank_idx;
    if (device::load(&peer->is_received_from) == 0)
      continue;
    const auto requests = RankRequests<typename Number::Scalar>::of(device::load(&peer->rows));
    const bool skips_alone = offers_rows && !requests.is_weighted;
#pragma unroll 1
    for (; token_idx < requests.num_tokens; token_idx += step) {
      rows.begin(requests, token_idx);
      if (!rows.next(requests, token_idx))
        continue;
      std::byte* const to = params.sums + rows.offset();
      if (skips_alone && !rows.next(requests, token_idx))
        continue;
      for_pieces<Unit>(row_bytes, [&](int64_t offset, int num_units) {
        const std::byte* const from = params.rows + offset;
        LaneSums<Number, Unit> sums;
        LaneUnits<Unit> coming;
        rows.begin_again(requests, token_idx);
        bool has_row = rows.next(requests, token_idx);
        if (has_row)
          coming.load(from + rows.offset(), num_units);
#pragma unroll 1
        while (has_row) {
          const LaneUnits<Unit> row = coming;
          const auto weight = rows.weight();
          has_row = rows.next(requests, token_idx);
          if (has_row)
            coming.load(from + rows.offset(), num_units);
          sums.template add<true>(row, weight);
        }
        sums.template store<true>(to + offset, num_units);
      });
      progress.tick();
    }
    token_idx -= requests.num_tokens;
  }
}

/// Tells every rank that has rows here, of the sums of @p epoch. The flag is that of its second
/// offers, of which a combine has none.
MOE_DEVICE void release_sums(const RankSumsParams& params, uint64_t epoch) {
  const Buffer& buffer = params.buffer;
#pragma unroll 1
  for (int i = device::thread_idx(); i < buffer.num_ranks; i += device::num_threads()) {
    const int peer_rank = (buffer.rank_idx + 1 + i) % buffer.num_ranks;
    if (device::load(&params.tables.peers[peer_rank].is_received_from) != 0)
      raise_flag(&workspace(buffer, peer_rank).second_offer(epoch, buffer.rank_idx).epoch, epoch);
  }
}

MOE_DEVICE bool await_sums(const RankSumsParams& params, int32_t* scratch) {
  const uint64_t epoch = device::load(params.tables.epoch);
  const layout::Workspace own = workspace(params.buffer, params.buffer.rank_idx);
  const WaitSite site{
      layout::Phase::kData, static_cast<int32_t>(layout::Operation::kCombine), epoch};
  return block_await_flags(
      params.buffer,
      site,
      epoch,
      params.buffer.stall_limit_ns,
      scratch,
      [&](int rank_idx) { return device::load(&params.tables.peers[rank_idx].is_sent_to) != 0; },
      [&](int rank_idx) { return &own.second_offer(epoch, rank_idx).epoch; });
}

/// Says where rows lie that are alone on their rank, in the second part of Tables::peers. By all
/// threads of a block. @return false when the kernel is to leave.
MOE_DEVICE bool find_rows(const RankSumsParams& params, int32_t* scratch) {
  const Buffer& buffer = params.buffer;
  const WaitSite site{layout::Phase::kOffers,
                      static_cast<int32_t>(layout::Operation::kCombine),
                      device::load(params.tables.epoch)};
  bool has_come = true;
#pragma unroll 1
  for (int rank_idx = device::thread_idx(); rank_idx < buffer.num_ranks;
       rank_idx += device::num_threads()) {
    const Peer* const peer = params.tables.peers + rank_idx;
    if (device::load(&peer->is_sent_to) == 0)
      continue;
    std::byte* rows = device::load(&peer->rows);
    const Offer offer = load_struct(&layout::RankSumsMap::header(rows)->rows);
    if (offer.bytes > 0)
      has_come = has_come && resolve(buffer, site, rank_idx, offer, &rows);
    device::store(&params.tables.peers[buffer.num_ranks + rank_idx].rows, rows);
  }
  return device::block_all(has_come, scratch);
}

// Grid: any number of blocks; a warp takes a token at a time, those of all ranks in one sequence.
// Protocol: the exchange in front acquired the requests of every peer. Sums are stored before the
//   blocks have counted themselves; the last one releases the flags, and waits for those of the
//   ranks that this rank pulls from, so that the combine behind this kernel may read there. No
//   other block waits. A window is written again only after the done flags of that combine.
// Example: rank 2 has rows 5 and 3 of the token above. Rank 2 stores row 5 + row 3, in this order
//   and rounded once, at row 5 of its sums; the token's rank pulls that one row.
template <typename Number>
MOE_KERNEL_OF(kMaxCombineThreads)
void add_rank_sums(const RankSumsParams params) {
  device::await_prerequisites();
  if (has_left(params.buffer) || device::load(params.tables.may_move) == 0)
    return;
  const int64_t row_bytes = params.hidden * static_cast<int64_t>(sizeof(typename Number::Bits));
  const uint64_t bits = static_cast<uint64_t>(row_bytes) | reinterpret_cast<uint64_t>(params.rows) |
                        reinterpret_cast<uint64_t>(params.sums);
  if (bits % sizeof(device::Bytes16) == 0)
    add_for_ranks<Number, device::Bytes16>(params, row_bytes);
  else
    add_for_ranks<Number, typename Number::Bits>(params, row_bytes);
  auto* const scratch = reinterpret_cast<int32_t*>(device::shared_memory());
  const bool is_last = finish_rows(params.buffer, params.tables, scratch, [&](uint64_t epoch) {
    release_sums(params, epoch);
    return true;
  });
  if (is_last && !(await_sums(params, scratch) && find_rows(params, scratch)) &&
      device::thread_idx() == 0)
    device::store(params.tables.status, static_cast<int32_t>(OperationStatus::kLeft));
}

}  // namespace

void launch_rank_requests(const device::Launch& launch, const RankRequestsParams& params) {
  const int64_t num_requests = params.num_tokens * params.num_slots;
  device::Launch shape = launch;
  shape.num_blocks = static_cast<int>(
      std::clamp<int64_t>(num_requests / launch.num_threads, 1, launch.num_blocks));
  device::launch(write_rank_requests, shape, params);
}

void launch_rank_sums(const device::Launch& launch, const RankSumsParams& params) {
  device::Launch shape = launch;
  const int num_words = launch.num_threads / device::kWarpSize;
  shape.shared_bytes = static_cast<size_t>(num_words > 2 ? num_words : 2) * sizeof(int32_t);
  switch (params.dtype) {
    case DType::kBFloat16:
      return device::launch(&add_rank_sums<device::BFloat16>, shape, params);
    case DType::kFloat16:
      return device::launch(&add_rank_sums<device::Float16>, shape, params);
    case DType::kFloat32:
      return device::launch(&add_rank_sums<device::Float32>, shape, params);
    case DType::kFloat64:
      return device::launch(&add_rank_sums<device::Float64>, shape, params);
    case DType::kBytes:
      break;
  }
  throw InvalidArgument("rows of bytes are not added");
}

}  // namespace moe::kernels
