#include "ops/dispatch_rules.h"

#include <algorithm>

namespace moe::ops {

using layout::ReceiveWindow;
using layout::RowLayout;

ReceiveWindow receive_window(const layout::Arrangement& arrangement,
                             const DispatchParams& params,
                             int64_t num_rows,
                             int64_t num_recv_topk) {
  const auto scales = layout::ScaleMap::make(arrangement.layout,
                                             num_rows,
                                             arrangement.rows_per_expert,
                                             params.num_scales,
                                             params.scale_bytes,
                                             params.is_column_major());
  return ReceiveWindow::make(arrangement.layout,
                             num_rows,
                             params.row_bytes,
                             scales,
                             params.weight_bytes,
                             num_recv_topk,
                             params.with_topk_idx(arrangement),
                             arrangement.has_origins);
}

layout::OperationArguments dispatch_arguments(const DispatchParams& params,
                                              const layout::Arrangement& arrangement) {
  layout::OperationArguments arguments = params.arguments;
  arguments.operation = static_cast<int32_t>(params.plan ? layout::Operation::kCachedDispatch
                                                         : layout::Operation::kDispatch);
  arguments.layout = static_cast<int32_t>(arrangement.layout);
  arguments.expert_alignment = static_cast<int32_t>(arrangement.expert_alignment);
  arguments.dtype = params.dtype;
  arguments.row_bytes = params.row_bytes;
  arguments.weight_bytes = params.weight_bytes;
  arguments.quantization = params.quantization.code;
  arguments.num_scales = static_cast<int32_t>(params.num_scales);
  arguments.scale_bytes = params.scale_bytes;
  arguments.plan_hash = params.plan ? params.plan->hash : 0;
  return arguments;
}

std::vector<ReceiveWindow> lay_out_windows(const layout::CountMatrix& counts,
                                           const layout::Placement& placement,
                                           const layout::Arrangement& arrangement,
                                           const DispatchParams& params) {
  const int64_t num_recv_topk = counts.num_recv_topk();
  std::vector<ReceiveWindow> windows;
  windows.reserve(static_cast<size_t>(counts.num_ranks));
  for (const int64_t num_rows : layout::num_window_rows(counts, placement, arrangement))
    windows.push_back(receive_window(arrangement, params, num_rows, num_recv_topk));
  return windows;
}

JudgedCounts judge_counts(layout::CountMatrix asked,
                          const EndpointBase& endpoint,
                          const layout::Arrangement& arrangement,
                          const layout::CapacityRule& capacity,
                          int64_t row_bytes) {
  const layout::Placement& placement = endpoint.placement();
  const int own_rank = endpoint.rank_idx();
  const auto find_overflow = [&](const layout::CountMatrix& counts) {
    return layout::find_overflow(counts, placement, arrangement, capacity, row_bytes);
  };
  // Choices of a masked rank take no place of an expert.
  const bool is_kept_first = arrangement.layout == layout::RowLayout::kLowLatency;
  JudgedCounts judged;
  judged.asked = {
      layout::num_required_rows(asked, placement, arrangement, own_rank),
      layout::received_rows(asked, placement, arrangement, own_rank).num_tokens_per_expert};
  if (!is_kept_first)
    judged.overflow = find_overflow(asked);
  if (judged.overflow)
    return judged;
  judged.kept = layout::keep_rows(std::move(asked), placement, arrangement, capacity);
  if (is_kept_first)
    judged.overflow = find_overflow(judged.kept);
  return judged;
}

void mask_ranks(const std::vector<int>& masked_ranks, const group::Group& group, int32_t* to_rank) {
  for (const int rank_idx : masked_ranks)
    to_rank[rank_idx] = layout::CountMatrix::kMasked;
  for (int rank_idx = 0; rank_idx < group.num_ranks(); ++rank_idx)
    if (!group.is_active(rank_idx))
      to_rank[rank_idx] = layout::CountMatrix::kMasked;
}

std::vector<int> find_short_ranks(const std::vector<ReceiveWindow>& windows,
                                  const std::vector<Offer>& offers,
                                  const group::Group& group) {
  std::vector<int> short_ranks;
  for (int rank_idx = 0; rank_idx < group.num_ranks(); ++rank_idx)
    if (group.is_active(rank_idx) &&
        static_cast<uint64_t>(windows[static_cast<size_t>(rank_idx)].bytes) >
            offers[static_cast<size_t>(rank_idx)].bytes)
      short_ranks.push_back(rank_idx);
  return short_ranks;
}

std::exception_ptr find_shortage(const std::vector<int>& short_ranks,
                                 const std::vector<layout::SecondOffer>& seconds,
                                 const std::vector<ReceiveWindow>& windows,
                                 const layout::CountMatrix& kept,
                                 const layout::Placement& placement,
                                 const layout::Arrangement& arrangement) {
  CapacityError error("", 0, 0);
  std::string message;
  for (size_t i = 0; i < short_ranks.size(); ++i) {
    const int rank_idx = short_ranks[i];
    const layout::SecondOffer& second = seconds[i];
    if (second.offer.bytes >= static_cast<uint64_t>(windows[static_cast<size_t>(rank_idx)].bytes))
      continue;
    error.ranks.push_back(rank_idx);
    error.needed_bytes = second.needed_bytes;
    error.available_bytes = second.available_bytes;
    message += concat(message.empty() ? "" : "; ",
                      "rank ",
                      rank_idx,
                      " needs ",
                      second.needed_bytes,
                      " bytes for the rows it would receive, ",
                      second.available_bytes,
                      " can be had");
  }
  if (error.ranks.empty())
    return nullptr;
  CapacityError full(message, error.needed_bytes, error.available_bytes);
  full.ranks = error.ranks;
  full.needed_rows =
      layout::received_rows(kept, placement, arrangement, full.ranks.front()).num_tokens_per_expert;
  return std::make_exception_ptr(full);
}

std::string describe_failed_rank(int64_t num_tokens, int rank_idx) {
  return concat(
      num_tokens, " tokens are routed to experts of rank ", rank_idx, ", which has failed");
}

std::string find_failed_ranks(const int32_t* to_rank, const group::Group& group) {
  for (int rank_idx = 0; rank_idx < group.num_ranks(); ++rank_idx)
    if (!group.is_active(rank_idx) && to_rank[rank_idx] > 0)
      return describe_failed_rank(to_rank[rank_idx], rank_idx);
  return "";
}

std::string find_lost_experts(const int32_t* counts,
                              const layout::Replicas& replicas,
                              const layout::Placement& placement,
                              const group::Group& group) {
  for (int expert_idx = 0; expert_idx < replicas.num_experts(); ++expert_idx) {
    const auto slots = replicas.slots.of_expert(expert_idx);
    const auto is_lost = [&](int32_t slot) {
      return !group.is_active(placement.expert_rank[static_cast<size_t>(slot)]);
    };
    if (counts[expert_idx] > 0 && std::ranges::all_of(slots, is_lost))
      return concat(counts[expert_idx],
                    " choices are of expert ",
                    expert_idx,
                    ", all of whose ranks have failed, the first of them rank ",
                    placement.expert_rank[static_cast<size_t>(slots.front())]);
  }
  return "";
}

std::string find_failed_ranks(const PlanHeader& plan, const group::Group& group) {
  for (int rank_idx = 0; rank_idx < group.num_ranks(); ++rank_idx) {
    if (group.is_active(rank_idx))
      continue;
    if (layout::sends_rows(plan.counts, group.rank_idx(), rank_idx))
      return concat("the handle sends rows to rank ", rank_idx, ", which has failed");
    if (layout::sends_rows(plan.counts, rank_idx, group.rank_idx()))
      return concat("the handle has places for rows of rank ", rank_idx, ", which has failed");
  }
  return "";
}

layout::Arrangement arrangement_of(const EndpointBase& endpoint,
                                   RowLayout layout,
                                   int64_t expert_alignment) {
  layout::Arrangement arrangement;
  arrangement.layout = layout;
  arrangement.expert_alignment = expert_alignment;
  if (layout == RowLayout::kLowLatency)
    arrangement.rows_per_expert = endpoint.num_ranks() * endpoint.config().num_max_tokens;
  arrangement.has_origins = endpoint.spans_devices() && !arrangement.is_by_rank();
  return arrangement;
}

int64_t num_low_latency_rows(const EndpointBase& endpoint) {
  const auto& owned = endpoint.placement().local_experts[static_cast<size_t>(endpoint.rank_idx())];
  return static_cast<int64_t>(owned.size()) *
         arrangement_of(endpoint, RowLayout::kLowLatency, 1).rows_per_expert;
}

ReceiveWindow low_latency_window(const EndpointBase& endpoint, const DispatchParams& params) {
  return receive_window(arrangement_of(endpoint, RowLayout::kLowLatency, 1),
                        params,
                        num_low_latency_rows(endpoint),
                        0);
}

bool is_copied_out(EndpointBase& endpoint, uint64_t bytes, CopyOut mode) {
  if (mode == CopyOut::kNever || bytes == 0)
    return false;
  if (mode == CopyOut::kAlways)
    return true;
  // Routing differs a little from step to step, and so will the further window that is to stay
  // free.
  const uint64_t further_bytes = std::max(bytes, endpoint.largest_recent_need());
  return endpoint.memory().largest_available_bytes() < further_bytes + further_bytes / 8;
}

}  // namespace moe::ops
