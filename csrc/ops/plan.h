#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "layout/routing.h"

namespace moe::ops {

class DeferredJoin;

/// Rows that all ranks ask of one, before a limit or a mask drops any of them.
struct AskedRows {
  int64_t num_rows = 0;                         ///< rows if nothing is dropped, with padding
  std::vector<int64_t> num_choices_per_expert;  ///< [num_local_experts]
};

/// Part of a plan that the host knows, wherever its slots lie. Immutable once made, except that
/// what follows from counts may come later.
struct PlanHeader {
  layout::Arrangement arrangement;
  int64_t num_tokens = 0;
  int64_t num_topk = 0;           ///< choices per token of this rank
  int64_t num_recv_topk = 0;      ///< the most of any rank
  int64_t num_slots = 0;          ///< slots per token, see layout::assign_slots
  layout::CountMatrix counts;     ///< rows that were kept; equal on every rank
  layout::ReceivedRows received;  ///< rows that this rank receives
  AskedRows asked;                ///< rows that it would receive if nothing were dropped
  /// Equal on every rank for one dispatch: of its counts, or of its epoch where handles come before
  /// those.
  uint64_t hash = 0;
  /// Verdict that counts come with later: who reads num_recv_topk, counts, or rows received or
  /// asked per expert, joins it before or sees that it has ended. Else null.
  std::shared_ptr<DeferredJoin> verdict;

  static PlanHeader make(const layout::Arrangement& arrangement,
                         layout::CountMatrix counts,
                         AskedRows asked,
                         const layout::Placement& placement,
                         int rank_idx,
                         int64_t num_tokens,
                         int64_t num_topk);

  /// Fills in what follows from counts. What does not, how many rows and experts there are, other
  /// threads may read meanwhile.
  void take_counts(PlanHeader counted) {
    num_recv_topk = counted.num_recv_topk;
    counts = std::move(counted.counts);
    std::ranges::copy(counted.received.num_tokens_per_expert,
                      received.num_tokens_per_expert.begin());
    std::ranges::copy(counted.received.expert_offsets, received.expert_offsets.begin());
    asked = std::move(counted.asked);
    if (hash != counted.hash)  // an operation may be reading it
      hash = counted.hash;
  }
  /// The hash of the dispatch of an epoch: none of a captured one, which counts captures.
  static constexpr uint64_t hash_of_epoch(uint64_t epoch) { return uint64_t{1} << 62 | epoch; }
  /// Returns whether counts are yet to come.
  bool awaits_counts() const;

  layout::RowLayout layout() const { return arrangement.layout; }
  int64_t num_rows() const { return received.num_rows; }
  /// [num_local_experts]
  std::vector<int64_t> num_dropped_per_expert() const {
    std::vector<int64_t> dropped = asked.num_choices_per_expert;
    for (size_t e = 0; e < dropped.size(); ++e)
      dropped[e] -= received.num_tokens_per_expert[e];
    return dropped;
  }
};

/// Places of the rows of one dispatch, on every rank: what a handle holds. Immutable once made.
struct Plan : PlanHeader {
  std::vector<int64_t> slots;     ///< [num_tokens, num_slots]
  std::vector<int64_t> topk_idx;  ///< [num_tokens, num_topk], a private copy

  static Plan make(const layout::Arrangement& arrangement,
                   layout::CountMatrix counts,
                   AskedRows asked,
                   const layout::Placement& placement,
                   int rank_idx,
                   std::vector<int64_t> topk_idx,
                   int64_t num_tokens,
                   int64_t num_topk);
};

}  // namespace moe::ops
