#include "layout/row_streams.h"

#include <algorithm>
#include <numeric>

namespace moe::layout {

namespace {

/// Difference between a row's position among those that @p rank_idx sends and its row here: by
/// expert, rank-major by rank.
std::vector<int64_t> position_shifts(const CountMatrix& counts,
                                     const Placement& placement,
                                     const Arrangement& arrangement,
                                     int rank_idx) {
  std::vector<int64_t> shifts =
      arrangement.is_by_rank() ? rank_stream_starts(counts, rank_idx)
                               : expert_stream_starts(counts, placement, arrangement, rank_idx);
  int64_t num_before = 0;
  const auto begin_stream = [&](int idx, int64_t num_rows) {
    shifts[static_cast<size_t>(idx)] = num_before - shifts[static_cast<size_t>(idx)];
    num_before += num_rows;
  };
  for (int dst_rank = 0; dst_rank < counts.num_ranks; ++dst_rank) {
    if (arrangement.is_by_rank()) {
      begin_stream(dst_rank, counts.to_rank(rank_idx, dst_rank));
      continue;
    }
    for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(dst_rank)])
      begin_stream(expert_idx, counts.to_expert(rank_idx, expert_idx));
  }
  return shifts;
}

/// Rows of the window of @p rank_idx, in order of (source rank, row).
std::vector<int64_t> arriving_rows(const CountMatrix& counts,
                                   const Placement& placement,
                                   const Arrangement& arrangement,
                                   int rank_idx,
                                   int64_t num_rows) {
  std::vector<int64_t> rows(static_cast<size_t>(num_rows));
  if (arrangement.is_by_rank()) {
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }
  auto next = rows.begin();
  for (int src_rank = 0; src_rank < counts.num_ranks; ++src_rank) {
    const std::vector<int64_t> starts =
        expert_stream_starts(counts, placement, arrangement, src_rank);
    for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(rank_idx)]) {
      const auto end = next + counts.to_expert(src_rank, expert_idx);
      std::iota(next, end, starts[static_cast<size_t>(expert_idx)]);
      next = end;
    }
  }
  return rows;
}

}  // namespace

RowStreams row_streams(const int64_t* topk_idx,
                       int64_t num_tokens,
                       int64_t num_topk,
                       const int64_t* slots,
                       const CountMatrix& counts,
                       const Placement& placement,
                       const Arrangement& arrangement,
                       int rank_idx) {
  RowStreams streams;
  for (int peer_rank = 0; peer_rank < counts.num_ranks; ++peer_rank) {
    streams.num_sent.push_back(
        num_rows_between(counts, placement, arrangement, rank_idx, peer_rank));
    streams.num_received.push_back(
        num_rows_between(counts, placement, arrangement, peer_rank, rank_idx));
  }
  const auto total = [](const std::vector<int64_t>& numbers) {
    return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
  };
  const int64_t num_slots =
      num_slots_per_token(arrangement.layout, num_topk, counts.num_ranks) * num_tokens;
  const std::vector<int64_t> shifts = position_shifts(counts, placement, arrangement, rank_idx);
  streams.positions.resize(static_cast<size_t>(num_slots));
  streams.sent_slots.resize(static_cast<size_t>(total(streams.num_sent)));
  for (int64_t i = 0; i < num_slots; ++i) {
    int64_t& position = streams.positions[static_cast<size_t>(i)];
    position = -1;
    if (slots[i] == Slot::kNone)
      continue;
    // By expert, a slot belongs to the choice of its number.
    const int64_t stream = arrangement.is_by_rank() ? Slot::rank_idx(slots[i]) : topk_idx[i];
    position = shifts[static_cast<size_t>(stream)] + Slot::row_idx(slots[i]);
    streams.sent_slots[static_cast<size_t>(position)] = i;
  }
  streams.window_rows =
      arriving_rows(counts, placement, arrangement, rank_idx, total(streams.num_received));
  return streams;
}

void choice_positions(const int64_t* topk_idx,
                      int64_t num_tokens,
                      int64_t num_topk,
                      const int64_t* slots,
                      const int64_t* positions,
                      const Placement& placement,
                      const Arrangement& arrangement,
                      int64_t* choices) {
  if (!arrangement.is_by_rank()) {
    std::copy_n(positions, num_tokens * num_topk, choices);
    return;
  }
  const int64_t num_slots = num_slots_per_token(arrangement.layout, num_topk, placement.num_ranks);
  for (int64_t i = 0; i < num_tokens * num_topk; ++i) {
    choices[i] = -1;
    if (topk_idx[i] < 0)
      continue;
    const int32_t dst_rank = placement.expert_rank[static_cast<size_t>(topk_idx[i])];
    const int64_t first = i / num_topk * num_slots;
    const int64_t* const slot =
        std::find_if(slots + first, slots + first + num_slots, [dst_rank](int64_t each) {
          return each != Slot::kNone && Slot::rank_idx(each) == dst_rank;
        });
    if (slot != slots + first + num_slots)
      choices[i] = positions[slot - slots];
  }
}

}  // namespace moe::layout
