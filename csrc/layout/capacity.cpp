#include "layout/capacity.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace moe::layout {

namespace {

/// Leaves the first @p limit rows of an expert, in order of source rank.
void clip_expert(CountMatrix* counts, int expert_idx, int64_t limit) {
  for (int src_rank = 0; src_rank < counts->num_ranks; ++src_rank) {
    int32_t& count = counts->row(src_rank)[expert_idx];
    count = static_cast<int32_t>(std::clamp<int64_t>(count, 0, std::max<int64_t>(limit, 0)));
    limit -= count;
  }
}

/// No rank sends to a rank whose experts keep nothing of it.
void forget_empty_streams(CountMatrix* counts, const Placement& placement) {
  for (int src_rank = 0; src_rank < counts->num_ranks; ++src_rank) {
    for (int dst_rank = 0; dst_rank < counts->num_ranks; ++dst_rank) {
      bool sends = false;
      for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(dst_rank)])
        sends = sends || counts->to_expert(src_rank, expert_idx) > 0;
      if (!sends)
        counts->row(src_rank)[counts->num_experts + dst_rank] = 0;
    }
  }
}

/// @return whether any rank is masked.
bool apply_masks(CountMatrix* counts, const Placement& placement) {
  const int num_ranks = counts->num_ranks;
  std::vector<uint8_t> is_masked(static_cast<size_t>(num_ranks));
  bool any = false;
  for (int src_rank = 0; src_rank < num_ranks; ++src_rank) {
    for (int rank_idx = 0; rank_idx < num_ranks; ++rank_idx) {
      int32_t& to_rank = counts->row(src_rank)[counts->num_experts + rank_idx];
      if (to_rank != CountMatrix::kMasked)
        continue;
      to_rank = 0;
      is_masked[static_cast<size_t>(rank_idx)] = 1;
      any = true;
    }
  }
  for (int rank_idx = 0; any && rank_idx < num_ranks; ++rank_idx) {
    if (!is_masked[static_cast<size_t>(rank_idx)])
      continue;
    std::fill_n(counts->row(rank_idx), counts->num_experts + num_ranks, 0);
    for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(rank_idx)])
      clip_expert(counts, expert_idx, 0);
  }
  return any;
}

bool has_limits(const CountMatrix& counts, const CapacityRule& rule) {
  bool has_fixed_rows = false;
  for (int rank_idx = 0; rank_idx < counts.num_ranks; ++rank_idx)
    has_fixed_rows = has_fixed_rows || counts.fixed_rows(rank_idx) >= 0;
  return has_fixed_rows || rule.expert_capacity >= 0;
}

void drop_rows(CountMatrix* counts,
               const Placement& placement,
               const Arrangement& arrangement,
               const CapacityRule& rule) {
  for (int expert_idx = 0; rule.expert_capacity >= 0 && expert_idx < counts->num_experts;
       ++expert_idx)
    clip_expert(counts, expert_idx, rule.expert_capacity);
  for (int rank_idx = 0; rank_idx < counts->num_ranks; ++rank_idx) {
    const int64_t fixed_rows = counts->fixed_rows(rank_idx);
    int64_t start = 0;
    for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(rank_idx)]) {
      if (fixed_rows >= 0)
        clip_expert(counts, expert_idx, fixed_rows - start);
      const int64_t kept = counts->to_expert(expert_idx);
      start += arrangement.expert_rows(kept);
    }
  }
}

}  // namespace

std::vector<Overflow> find_overflows(const CountMatrix& asked,
                                     const Placement& placement,
                                     const Arrangement& arrangement,
                                     const CapacityRule& rule) {
  std::vector<Overflow> overflows;
  const bool is_low_latency = arrangement.layout == RowLayout::kLowLatency;
  const int64_t limit = is_low_latency ? arrangement.rows_per_expert : rule.expert_capacity;
  for (int expert_idx = 0; limit >= 0 && expert_idx < asked.num_experts; ++expert_idx) {
    const int64_t needed = asked.to_expert(expert_idx);
    if (needed > limit)
      overflows.push_back(
          {placement.expert_rank[static_cast<size_t>(expert_idx)], expert_idx, needed, limit});
  }
  if (is_low_latency)
    return overflows;
  for (int rank_idx = 0; rank_idx < asked.num_ranks; ++rank_idx) {
    const int64_t fixed_rows = asked.fixed_rows(rank_idx);
    const int64_t needed = num_required_rows(asked, placement, arrangement, rank_idx);
    if (fixed_rows >= 0 && needed > fixed_rows)
      overflows.push_back({rank_idx, -1, needed, fixed_rows});
  }
  return overflows;
}

std::exception_ptr find_overflow(const CountMatrix& asked,
                                 const Placement& placement,
                                 const Arrangement& arrangement,
                                 const CapacityRule& rule,
                                 int64_t row_bytes) {
  const bool is_low_latency = arrangement.layout == RowLayout::kLowLatency;
  if (!is_low_latency && rule.on_overflow != OnOverflow::kRaise)
    return nullptr;
  const std::vector<Overflow> overflows = find_overflows(asked, placement, arrangement, rule);
  if (overflows.empty())
    return nullptr;
  std::string message;
  std::vector<int> ranks;
  for (const Overflow& overflow : overflows) {
    message += message.empty() ? "" : "; ";
    if (overflow.expert_idx >= 0)
      message += concat("expert ", overflow.expert_idx, " on ");
    message += concat("rank ",
                      overflow.rank_idx,
                      " would receive ",
                      overflow.needed_rows,
                      " rows, it has room for ",
                      overflow.available_rows);
    if (std::find(ranks.begin(), ranks.end(), overflow.rank_idx) == ranks.end())
      ranks.push_back(overflow.rank_idx);
  }
  if (is_low_latency)
    return std::make_exception_ptr(InvalidArgument(message));
  const Overflow& first = overflows.front();
  CapacityError error(message,
                      static_cast<uint64_t>(first.needed_rows * row_bytes),
                      static_cast<uint64_t>(first.available_rows * row_bytes));
  error.ranks = std::move(ranks);
  error.needed_rows =
      received_rows(asked, placement, arrangement, first.rank_idx).num_tokens_per_expert;
  return std::make_exception_ptr(error);
}

CountMatrix keep_rows(CountMatrix asked,
                      const Placement& placement,
                      const Arrangement& arrangement,
                      const CapacityRule& rule) {
  if (arrangement.layout == RowLayout::kLowLatency) {
    if (apply_masks(&asked, placement))
      forget_empty_streams(&asked, placement);
    return asked;
  }
  if (!has_limits(asked, rule))
    return asked;
  if (rule.on_overflow == OnOverflow::kDrop) {
    drop_rows(&asked, placement, arrangement, rule);
    forget_empty_streams(&asked, placement);
    return asked;
  }
  for (int rank_idx = 0; rank_idx < asked.num_ranks; ++rank_idx) {
    int32_t& fixed_rows = asked.row(rank_idx)[asked.num_experts + asked.num_ranks];
    if (fixed_rows >= 0)
      fixed_rows = static_cast<int32_t>(std::max<int64_t>(
          fixed_rows, num_required_rows(asked, placement, arrangement, rank_idx)));
  }
  return asked;
}

}  // namespace moe::layout
