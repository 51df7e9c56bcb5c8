#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "layout/workspace.h"
#include "ops/dispatch.h"

// Rules that every rank works out alike from one dispatch's arguments and count matrix, on every
// engine; and the texts of what is wrong.

namespace moe::ops {

layout::OperationArguments dispatch_arguments(const DispatchParams& params,
                                              const layout::Arrangement& arrangement);

/// A receive window of @p num_rows.
layout::ReceiveWindow receive_window(const layout::Arrangement& arrangement,
                                     const DispatchParams& params,
                                     int64_t num_rows,
                                     int64_t num_recv_topk);

/// The receive window of every rank.
std::vector<layout::ReceiveWindow> lay_out_windows(const layout::CountMatrix& counts,
                                                   const layout::Placement& placement,
                                                   const layout::Arrangement& arrangement,
                                                   const DispatchParams& params);

/// Findings of every rank in the counts of an uncached dispatch.
struct JudgedCounts {
  /// Error that every rank throws, and then nothing of the rest; else null.
  std::exception_ptr overflow;
  layout::CountMatrix kept;
  AskedRows asked;  ///< rows of this rank
};

JudgedCounts judge_counts(layout::CountMatrix asked,
                          const EndpointBase& endpoint,
                          const layout::Arrangement& arrangement,
                          const layout::CapacityRule& capacity,
                          int64_t row_bytes);

/// Ranks agree in the count matrix on which are masked; every rank masks those that have failed.
/// @param to_rank  [num_ranks] of this rank's row.
void mask_ranks(const std::vector<int>& masked_ranks, const group::Group& group, int32_t* to_rank);

/// Ranks whose offer is too small for what they receive.
std::vector<int> find_short_ranks(const std::vector<layout::ReceiveWindow>& windows,
                                  const std::vector<Offer>& offers,
                                  const group::Group& group);

/// Error that every rank throws where a second offer is too small, else null.
/// @param seconds  Second offers of @p short_ranks, in their order.
std::exception_ptr find_shortage(const std::vector<int>& short_ranks,
                                 const std::vector<layout::SecondOffer>& seconds,
                                 const std::vector<layout::ReceiveWindow>& windows,
                                 const layout::CountMatrix& kept,
                                 const layout::Placement& placement,
                                 const layout::Arrangement& arrangement);

/// "3 tokens are routed to experts of rank 1, which has failed"
std::string describe_failed_rank(int64_t num_tokens, int rank_idx);

/// Text of what is wrong where rows go to ranks that have failed, "" for nothing.
/// @param to_rank  [num_ranks] tokens bound for every rank.
std::string find_failed_ranks(const int32_t* to_rank, const group::Group& group);
/// The same where living replicas take the rows: experts that have none.
/// @param counts  Choices of every logical expert.
std::string find_lost_experts(const int32_t* counts,
                              const layout::Replicas& replicas,
                              const layout::Placement& placement,
                              const group::Group& group);
/// The same for the rows of a plan, which also has places for those of other ranks.
std::string find_failed_ranks(const PlanHeader& plan, const group::Group& group);

}  // namespace moe::ops
