#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/math.h"
#include "layout/row.h"

namespace moe::layout {

/// Place of a row: destination rank and row index in its window, packed as `rank << 48 | row`.
struct Slot {
  static constexpr int kRowBits = 48;
  static constexpr int64_t kNone = -1;
  /// A bit that no slot has: marks the first of a token's in the requests of a combine across
  /// nodes.
  static constexpr int64_t kFirstOfToken = int64_t{1} << 62;
  /// The same bit of the slots of a token whose row goes once to each rank: the rank of the slot
  /// copies the row there. kNone has it, too.
  static constexpr int64_t kIsCopy = int64_t{1} << 62;

  MOE_HOST_DEVICE static int64_t pack(int rank_idx, int64_t row_idx) {
    return (static_cast<int64_t>(rank_idx) << kRowBits) | row_idx;
  }
  MOE_HOST_DEVICE static int rank_idx(int64_t slot) { return static_cast<int>(slot >> kRowBits); }
  MOE_HOST_DEVICE static int64_t row_idx(int64_t slot) {
    return slot & ((int64_t{1} << kRowBits) - 1);
  }
  /// Returns whether there is a slot, and the sender writes the row there.
  MOE_HOST_DEVICE static bool is_written(int64_t slot) { return (slot & kIsCopy) == 0; }
  MOE_HOST_DEVICE static int64_t unmarked(int64_t slot) {
    return slot == kNone ? kNone : slot & ~kIsCopy;
  }
};

/// Owner of every expert, and the local order of each rank's.
struct Placement {
  int num_ranks = 0;
  int num_experts = 0;
  std::vector<int32_t> expert_rank;                 ///< [num_experts]
  std::vector<int32_t> local_expert_idx;            ///< [num_experts], ascending id on the owner
  std::vector<std::vector<int32_t>> local_experts;  ///< per rank, ascending global ids

  Placement() = default;
  Placement(std::vector<int32_t> expert_rank, int num_ranks);
};

/// Order of the rows of a window, and where experts begin.
struct Arrangement {
  RowLayout layout = RowLayout::kExpertMajor;
  int64_t expert_alignment = 1;
  int64_t rows_per_expert = 0;  ///< low-latency: rows that every expert owns, filled or not
  /// By expert, where ranks lie on several devices: a row goes once to a rank of another device,
  /// which copies it to the token's other slots there. A window says which rows are copies.
  bool has_origins = false;

  MOE_HOST_DEVICE bool is_by_rank() const { return layout == RowLayout::kRankMajor; }
  /// Rows of a window that @p count rows of one expert take.
  MOE_HOST_DEVICE int64_t expert_rows(int64_t count) const {
    return layout == RowLayout::kLowLatency ? rows_per_expert : round_up(count, expert_alignment);
  }
};

/// Numbers of rows that every rank sends to each. Row r of the matrix is what rank r says:
///   its choices of every expert [num_experts]; its tokens bound for every distinct rank
///   [num_ranks], or kMasked for a rank it masks; the rows of its own result where a capacity fixes
///   them, else -1; its choices per token.
struct CountMatrix {
  static constexpr int32_t kMasked = -1;

  int num_ranks = 0;
  int num_experts = 0;
  std::vector<int32_t> counts;  ///< [num_ranks, Row::num_counts(num_ranks, num_experts)]

  CountMatrix() = default;
  CountMatrix(int num_ranks, int num_experts)
      : num_ranks(num_ranks),
        num_experts(num_experts),
        counts(static_cast<size_t>(num_ranks) *
               static_cast<size_t>(Row::num_counts(num_ranks, num_experts))) {}

  int32_t* row(int rank_idx) { return counts.data() + int64_t{stride()} * rank_idx; }
  const int32_t* row(int rank_idx) const { return counts.data() + int64_t{stride()} * rank_idx; }
  int stride() const { return Row::num_counts(num_ranks, num_experts); }
  int64_t to_expert(int src_rank, int expert_idx) const { return row(src_rank)[expert_idx]; }
  int64_t to_rank(int src_rank, int dst_rank) const {
    return row(src_rank)[num_experts + dst_rank];
  }
  int64_t fixed_rows(int rank_idx) const { return row(rank_idx)[num_experts + num_ranks]; }
  int64_t num_topk(int rank_idx) const { return row(rank_idx)[num_experts + num_ranks + 1]; }
  /// Choices per token that a rank-major row has room for: the most of any rank.
  int64_t num_recv_topk() const;
  /// Choices of one expert, by all ranks.
  int64_t to_expert(int expert_idx) const;
  /// Choices of every expert, by the ranks before @p end_rank: [num_experts]. Adds whole rows: to
  /// ask for every expert takes several times as long.
  std::vector<int64_t> to_experts(int end_rank) const;
  uint64_t hash(uint64_t seed) const;
};

/// Rows that one rank receives, from the count matrix alone.
///
/// Example: 2 ranks, rank 1 owns experts 1 and 2, alignment 4. Rank 0 sends 3 rows to expert 1 and
/// 1 to expert 2, rank 1 sends 2 to expert 1. Then on rank 1 num_tokens_per_expert = [5, 1],
/// expert_offsets = [0, 8, 12] and num_rows = 12; rank 1's own rows for expert 1 start at row 3.
struct ReceivedRows {
  int64_t num_rows = 0;                        ///< padding included
  std::vector<int64_t> num_tokens_per_expert;  ///< [num_local_experts], choices
  std::vector<int64_t> expert_offsets;         ///< [num_local_experts + 1], padded starts
};

ReceivedRows received_rows(const CountMatrix& counts,
                           const Placement& placement,
                           const Arrangement& arrangement,
                           int rank_idx);

/// Rows @p rank_idx receives, padding included, whatever a capacity says.
int64_t num_required_rows(const CountMatrix& counts,
                          const Placement& placement,
                          const Arrangement& arrangement,
                          int rank_idx);

/// Rows of the window of @p rank_idx: what a capacity fixed, else what it receives.
int64_t num_window_rows(const CountMatrix& counts,
                        const Placement& placement,
                        const Arrangement& arrangement,
                        int rank_idx);
/// The same of every rank: [num_ranks].
std::vector<int64_t> num_window_rows(const CountMatrix& counts,
                                     const Placement& placement,
                                     const Arrangement& arrangement);

/// Returns whether @p src_rank sends any row to @p dst_rank.
bool sends_rows(const CountMatrix& counts, int src_rank, int dst_rank);

/// Rows that @p src_rank sends to @p dst_rank.
int64_t num_rows_between(const CountMatrix& counts,
                         const Placement& placement,
                         const Arrangement& arrangement,
                         int src_rank,
                         int dst_rank);

/// First row that @p src_rank writes for every expert in its owner's window (expert-major).
std::vector<int64_t> expert_stream_starts(const CountMatrix& counts,
                                          const Placement& placement,
                                          const Arrangement& arrangement,
                                          int src_rank);

/// First row that @p src_rank writes on every rank (rank-major).
std::vector<int64_t> rank_stream_starts(const CountMatrix& counts, int src_rank);

/// Counts of one rank's choices. Ids must lie in [-1, num_experts).
/// @param topk_idx  [num_tokens, num_topk]
/// @param counts    [num_experts + num_ranks] and more; these are overwritten
/// @return the flat index of the first id outside the range, or -1.
int64_t count_choices(const int64_t* topk_idx,
                      int64_t num_tokens,
                      int64_t num_topk,
                      const Placement& placement,
                      int32_t* counts);

/// "topk_idx[3, 1] = 9 is not ..."
std::string describe_bad_expert(int64_t flat_idx,
                                int64_t num_topk,
                                int64_t expert_idx,
                                int num_experts);

/// Text of what is wrong with a row of the count matrix of a rank with @p num_tokens, "" for
/// nothing: no rank's choices come to it.
std::string describe_bad_counts(const int32_t* counts,
                                int64_t num_tokens,
                                int num_ranks,
                                int num_experts);

/// Returns whether @p counts may be what was kept of a dispatch in which @p rank_idx chose @p
/// topk_idx. How many tokens are bound for a rank matters where it receives one row of each.
bool may_keep(const CountMatrix& counts,
              const int64_t* topk_idx,
              int64_t num_tokens,
              int64_t num_topk,
              const Placement& placement,
              bool is_by_rank,
              int rank_idx);

/// Slot of every row this rank sends. Choices beyond what @p counts says was kept of an expert get
/// no slot.
/// @param slots  rank-major: [num_tokens, min(num_topk, num_ranks)], destination ranks ascending,
///   then Slot::kNone; else: [num_tokens, num_topk], entry k for choice k.
void assign_slots(const int64_t* topk_idx,
                  int64_t num_tokens,
                  int64_t num_topk,
                  const CountMatrix& counts,
                  const Placement& placement,
                  const Arrangement& arrangement,
                  int rank_idx,
                  int64_t* slots);

MOE_HOST_DEVICE inline int64_t num_slots_per_token(RowLayout layout,
                                                   int64_t num_topk,
                                                   int num_ranks) {
  if (layout != RowLayout::kRankMajor)
    return num_topk;
  return num_topk < num_ranks ? num_topk : num_ranks;
}

}  // namespace moe::layout
