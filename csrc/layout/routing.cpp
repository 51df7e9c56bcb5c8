#include "layout/routing.h"

#include <algorithm>

#include "core/error.h"
#include "core/math.h"

namespace moe::layout {

Placement::Placement(std::vector<int32_t> expert_rank_in, int num_ranks_in)
    : num_ranks(num_ranks_in),
      num_experts(static_cast<int>(expert_rank_in.size())),
      expert_rank(std::move(expert_rank_in)),
      local_expert_idx(expert_rank.size()),
      local_experts(static_cast<size_t>(num_ranks_in)) {
  for (int expert_idx = 0; expert_idx < num_experts; ++expert_idx) {
    auto& owned = local_experts[static_cast<size_t>(expert_rank[expert_idx])];
    local_expert_idx[expert_idx] = static_cast<int32_t>(owned.size());
    owned.push_back(expert_idx);
  }
}

uint64_t CountMatrix::hash(uint64_t seed) const {
  return hash_words(counts.data(), static_cast<int64_t>(counts.size()), seed);
}

int64_t CountMatrix::num_recv_topk() const {
  int64_t most = 0;
  for (int rank_idx = 0; rank_idx < num_ranks; ++rank_idx)
    most = std::max(most, num_topk(rank_idx));
  return most;
}

int64_t CountMatrix::to_expert(int expert_idx) const {
  int64_t total = 0;
  const int64_t step = stride();
  const int32_t* choices = counts.data() + expert_idx;
  for (int src_rank = 0; src_rank < num_ranks; ++src_rank, choices += step)
    total += *choices;
  return total;
}

std::vector<int64_t> CountMatrix::to_experts(int end_rank) const {
  std::vector<int64_t> totals(static_cast<size_t>(num_experts));
  for (int src_rank = 0; src_rank < end_rank; ++src_rank) {
    const int32_t* const choices = row(src_rank);
    for (int expert_idx = 0; expert_idx < num_experts; ++expert_idx)
      totals[static_cast<size_t>(expert_idx)] += choices[expert_idx];
  }
  return totals;
}

namespace {

/// Arrangement::expert_rows(), without its division where nothing is padded.
int64_t expert_rows(const Arrangement& arrangement, int64_t count) {
  const bool is_padded =
      arrangement.layout == RowLayout::kLowLatency || arrangement.expert_alignment != 1;
  return is_padded ? arrangement.expert_rows(count) : count;
}

int64_t window_rows(const Arrangement& arrangement, int64_t fixed_rows, int64_t required_rows) {
  const bool is_fixed = fixed_rows >= 0 && arrangement.layout != RowLayout::kLowLatency;
  return is_fixed ? fixed_rows : required_rows;
}

}  // namespace

ReceivedRows received_rows(const CountMatrix& counts,
                           const Placement& placement,
                           const Arrangement& arrangement,
                           int rank_idx) {
  const auto& owned = placement.local_experts[static_cast<size_t>(rank_idx)];
  ReceivedRows received;
  received.num_tokens_per_expert.resize(owned.size());
  received.expert_offsets.resize(owned.size() + 1);
  int64_t start = 0;
  for (size_t e = 0; e < owned.size(); ++e) {
    const int64_t count = counts.to_expert(owned[e]);
    received.num_tokens_per_expert[e] = count;
    start += expert_rows(arrangement, count);
    received.expert_offsets[e + 1] = start;
  }
  const int64_t required_rows = arrangement.is_by_rank()
                                    ? num_required_rows(counts, placement, arrangement, rank_idx)
                                    : start;
  received.num_rows = window_rows(arrangement, counts.fixed_rows(rank_idx), required_rows);
  return received;
}

int64_t num_required_rows(const CountMatrix& counts,
                          const Placement& placement,
                          const Arrangement& arrangement,
                          int rank_idx) {
  int64_t num_rows = 0;
  if (arrangement.is_by_rank()) {
    for (int src_rank = 0; src_rank < counts.num_ranks; ++src_rank)
      num_rows += counts.to_rank(src_rank, rank_idx);
    return num_rows;
  }
  const auto& owned = placement.local_experts[static_cast<size_t>(rank_idx)];
  if (arrangement.layout == RowLayout::kLowLatency)
    return static_cast<int64_t>(owned.size()) * arrangement.rows_per_expert;
  for (const int32_t expert_idx : owned)
    num_rows += expert_rows(arrangement, counts.to_expert(expert_idx));
  return num_rows;
}

int64_t num_window_rows(const CountMatrix& counts,
                        const Placement& placement,
                        const Arrangement& arrangement,
                        int rank_idx) {
  return window_rows(arrangement,
                     counts.fixed_rows(rank_idx),
                     num_required_rows(counts, placement, arrangement, rank_idx));
}

std::vector<int64_t> num_window_rows(const CountMatrix& counts,
                                     const Placement& placement,
                                     const Arrangement& arrangement) {
  std::vector<int64_t> num_rows(static_cast<size_t>(counts.num_ranks));
  const bool is_by_rank = arrangement.is_by_rank();
  const std::vector<int64_t> totals = counts.to_experts(is_by_rank ? 0 : counts.num_ranks);
  for (int rank_idx = 0; rank_idx < counts.num_ranks; ++rank_idx) {
    int64_t required_rows = 0;
    if (is_by_rank)
      required_rows = num_required_rows(counts, placement, arrangement, rank_idx);
    else
      for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(rank_idx)])
        required_rows += expert_rows(arrangement, totals[static_cast<size_t>(expert_idx)]);
    num_rows[static_cast<size_t>(rank_idx)] =
        window_rows(arrangement, counts.fixed_rows(rank_idx), required_rows);
  }
  return num_rows;
}

bool sends_rows(const CountMatrix& counts, int src_rank, int dst_rank) {
  return counts.to_rank(src_rank, dst_rank) > 0;
}

int64_t num_rows_between(const CountMatrix& counts,
                         const Placement& placement,
                         const Arrangement& arrangement,
                         int src_rank,
                         int dst_rank) {
  if (arrangement.is_by_rank())
    return counts.to_rank(src_rank, dst_rank);
  int64_t num_rows = 0;
  for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(dst_rank)])
    num_rows += counts.to_expert(src_rank, expert_idx);
  return num_rows;
}

std::vector<int64_t> expert_stream_starts(const CountMatrix& counts,
                                          const Placement& placement,
                                          const Arrangement& arrangement,
                                          int src_rank) {
  std::vector<int64_t> starts = counts.to_experts(src_rank);
  const std::vector<int64_t> totals = counts.to_experts(counts.num_ranks);
  for (const auto& owned : placement.local_experts) {
    int64_t start = 0;
    for (const int32_t expert_idx : owned) {
      starts[static_cast<size_t>(expert_idx)] += start;
      start += expert_rows(arrangement, totals[static_cast<size_t>(expert_idx)]);
    }
  }
  return starts;
}

std::vector<int64_t> rank_stream_starts(const CountMatrix& counts, int src_rank) {
  std::vector<int64_t> starts(static_cast<size_t>(counts.num_ranks));
  for (int dst_rank = 0; dst_rank < counts.num_ranks; ++dst_rank)
    for (int peer_rank = 0; peer_rank < src_rank; ++peer_rank)
      starts[static_cast<size_t>(dst_rank)] += counts.to_rank(peer_rank, dst_rank);
  return starts;
}

int64_t count_choices(const int64_t* topk_idx,
                      int64_t num_tokens,
                      int64_t num_topk,
                      const Placement& placement,
                      int32_t* counts) {
  const int num_experts = placement.num_experts;
  std::fill_n(counts, num_experts + placement.num_ranks, 0);
  int32_t* const to_rank = counts + num_experts;
  // Token that was last counted for a rank: a token counts once per distinct rank.
  std::vector<int64_t> last_token(static_cast<size_t>(placement.num_ranks), -1);
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx) {
    for (int64_t k = 0; k < num_topk; ++k) {
      const int64_t flat_idx = token_idx * num_topk + k;
      const int64_t expert_idx = topk_idx[flat_idx];
      if (expert_idx < 0 || expert_idx >= num_experts) {
        if (expert_idx == -1)
          continue;
        return flat_idx;
      }
      ++counts[expert_idx];
      const auto dst_rank = static_cast<size_t>(placement.expert_rank[expert_idx]);
      if (last_token[dst_rank] != token_idx) {
        last_token[dst_rank] = token_idx;
        ++to_rank[dst_rank];
      }
    }
  }
  return -1;
}

std::string describe_bad_expert(int64_t flat_idx,
                                int64_t num_topk,
                                int64_t expert_idx,
                                int num_experts) {
  return concat("topk_idx[",
                flat_idx / num_topk,
                ", ",
                flat_idx % num_topk,
                "] = ",
                expert_idx,
                " is not an expert id in [-1, ",
                num_experts,
                ")");
}

std::string describe_bad_counts(const int32_t* counts,
                                int64_t num_tokens,
                                int num_ranks,
                                int num_experts) {
  const int32_t* const to_rank = counts + num_experts;
  const int64_t fixed_rows = to_rank[num_ranks];
  const int64_t num_topk = to_rank[num_ranks + 1];
  if (num_tokens < 0 || num_topk < 0 || fixed_rows < -1)
    return concat("it dispatches ",
                  num_tokens,
                  " tokens of ",
                  num_topk,
                  " choices and receives ",
                  fixed_rows,
                  " rows");
  int64_t num_left = num_tokens * num_topk;
  for (int expert_idx = 0; expert_idx < num_experts; ++expert_idx) {
    num_left -= counts[expert_idx];
    if (counts[expert_idx] < 0 || num_left < 0)
      return concat(counts[expert_idx],
                    " choices of its ",
                    num_tokens * num_topk,
                    " are of expert ",
                    expert_idx,
                    ", ",
                    num_left,
                    " are left");
  }
  for (int dst_rank = 0; dst_rank < num_ranks; ++dst_rank)
    if (to_rank[dst_rank] > num_tokens ||
        (to_rank[dst_rank] < 0 && to_rank[dst_rank] != CountMatrix::kMasked))
      return concat(
          to_rank[dst_rank], " of its ", num_tokens, " tokens are bound for rank ", dst_rank);
  return "";
}

bool may_keep(const CountMatrix& counts,
              const int64_t* topk_idx,
              int64_t num_tokens,
              int64_t num_topk,
              const Placement& placement,
              bool is_by_rank,
              int rank_idx) {
  std::vector<int32_t> asked(static_cast<size_t>(counts.stride()));
  if (counts.num_topk(rank_idx) != num_topk ||
      count_choices(topk_idx, num_tokens, num_topk, placement, asked.data()) >= 0)
    return false;
  const int32_t* const kept = counts.row(rank_idx);
  for (int expert_idx = 0; expert_idx < counts.num_experts; ++expert_idx)
    if (kept[expert_idx] < 0 || kept[expert_idx] > asked[static_cast<size_t>(expert_idx)])
      return false;
  for (int dst_rank = 0; dst_rank < counts.num_ranks; ++dst_rank) {
    bool sends = false;
    int64_t num_rows = 0;
    for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(dst_rank)]) {
      sends = sends || kept[expert_idx] > 0;
      num_rows += asked[static_cast<size_t>(expert_idx)];
    }
    const int64_t num_tokens = asked[static_cast<size_t>(counts.num_experts + dst_rank)];
    const int64_t said = counts.to_rank(rank_idx, dst_rank);
    // share_rows() of layout/replicas.h counts rows.
    if (said != (sends ? num_tokens : 0) && (is_by_rank || said != (sends ? num_rows : 0)))
      return false;
  }
  return true;
}

namespace {

void assign_expert_major(const int64_t* topk_idx,
                         int64_t num_choices,
                         const Placement& placement,
                         const int32_t* kept,
                         std::vector<int64_t> next_row,
                         int64_t* slots) {
  std::vector<int32_t> left(kept, kept + placement.num_experts);
  for (int64_t i = 0; i < num_choices; ++i) {
    const int64_t expert_idx = topk_idx[i];
    slots[i] = expert_idx < 0 || left[expert_idx]-- <= 0
                   ? Slot::kNone
                   : Slot::pack(placement.expert_rank[expert_idx], next_row[expert_idx]++);
  }
}

void assign_rank_major(const int64_t* topk_idx,
                       int64_t num_tokens,
                       int64_t num_topk,
                       int64_t num_slots,
                       const Placement& placement,
                       std::vector<int64_t> next_row,
                       int64_t* slots) {
  std::vector<uint8_t> is_bound(static_cast<size_t>(placement.num_ranks));
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx) {
    std::fill(is_bound.begin(), is_bound.end(), uint8_t{0});
    for (int64_t k = 0; k < num_topk; ++k) {
      const int64_t expert_idx = topk_idx[token_idx * num_topk + k];
      if (expert_idx >= 0)
        is_bound[static_cast<size_t>(placement.expert_rank[expert_idx])] = 1;
    }
    int64_t* const token_slots = slots + token_idx * num_slots;
    int64_t num_bound = 0;
    for (int dst_rank = 0; dst_rank < placement.num_ranks; ++dst_rank)
      if (is_bound[static_cast<size_t>(dst_rank)])
        token_slots[num_bound++] = Slot::pack(dst_rank, next_row[static_cast<size_t>(dst_rank)]++);
    std::fill(token_slots + num_bound, token_slots + num_slots, Slot::kNone);
  }
}

}  // namespace

void assign_slots(const int64_t* topk_idx,
                  int64_t num_tokens,
                  int64_t num_topk,
                  const CountMatrix& counts,
                  const Placement& placement,
                  const Arrangement& arrangement,
                  int rank_idx,
                  int64_t* slots) {
  if (!arrangement.is_by_rank()) {
    assign_expert_major(topk_idx,
                        num_tokens * num_topk,
                        placement,
                        counts.row(rank_idx),
                        expert_stream_starts(counts, placement, arrangement, rank_idx),
                        slots);
    return;
  }
  assign_rank_major(topk_idx,
                    num_tokens,
                    num_topk,
                    num_slots_per_token(arrangement.layout, num_topk, placement.num_ranks),
                    placement,
                    rank_stream_starts(counts, rank_idx),
                    slots);
}

}  // namespace moe::layout
