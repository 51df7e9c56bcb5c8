#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/capacity.h"
#include "layout/routing.h"

// What a dispatch is, row by row: what all schedules compare with, of kernels and of the CPU
// backend. Of csrc/layout it takes the words and no arithmetic, and holds its functions, too.

namespace moe::simt::checker {

/// Requests of one rank.
struct AskedOfRank {
  std::vector<int64_t> topk_idx;  ///< [num_tokens, num_topk]
  int64_t num_topk = 0;
  std::vector<uint8_t> is_masked;  ///< [num_ranks], or empty for none
  int64_t fixed_rows = -1;

  int64_t num_tokens() const {
    return num_topk == 0 ? 0 : static_cast<int64_t>(topk_idx.size()) / num_topk;
  }
};

/// Content of one row of a window: a choice of a token; by rank a token; or nothing.
struct Origin {
  int rank_idx = -1;  ///< -1 for nothing
  int64_t token_idx = -1;
  int64_t topk_pos = -1;  ///< of a choice; -1 by rank

  bool is_nothing() const { return rank_idx < 0; }
};

/// A row that is added for a token.
struct Term {
  int rank_idx = 0;
  int64_t row_idx = 0;
  int64_t topk_pos = 0;  ///< as in Origin
};

class DispatchSpec {
 public:
  DispatchSpec(const layout::Arrangement& arrangement,
               const layout::CapacityRule& rule,
               std::vector<int32_t> expert_rank,
               std::vector<AskedOfRank> asked);

  /// Returns whether more is asked for than a limit that raises, or the places of an expert, allow.
  bool has_overflow() const;
  /// The rows of a rank's window, in order; none where there is an overflow.
  const std::vector<Origin>& rows(int rank_idx) const {
    return rows_[static_cast<size_t>(rank_idx)];
  }
  /// Rows that are added for a token of @p rank_idx, in its order: by choice, or by rank.
  const std::vector<Term>& terms(int rank_idx, int64_t token_idx) const {
    return terms_[static_cast<size_t>(rank_idx)][static_cast<size_t>(token_idx)];
  }
  layout::ReceivedRows received(int rank_idx) const;
  /// Delivered rows, as ranks keep them.
  layout::CountMatrix counts() const;
  /// [num_tokens, slots of a token]
  std::vector<int64_t> slots(int rank_idx) const;
  /// First rows that @p src_rank writes: by expert, or by rank.
  std::vector<int64_t> stream_starts(int src_rank) const;

  /// Differences of csrc/layout for @p asked, "" for nothing.
  std::string difference_of_layout(const layout::CountMatrix& asked) const;

 private:
  int num_ranks() const { return static_cast<int>(asked_.size()); }
  int num_experts() const { return static_cast<int>(expert_rank_.size()); }
  std::vector<int> experts_of(int rank_idx) const;
  std::vector<std::vector<Origin>> all_choices() const;
  void keep();
  void place_rows();
  int64_t padded(int64_t num_rows) const;
  int64_t num_required_rows(int rank_idx) const;
  int64_t num_fixed_rows(int rank_idx) const;
  int64_t num_kept(int src_rank, int dst_rank) const;
  int64_t num_tokens_between(int src_rank, int dst_rank) const;
  bool goes_to(int src_rank, int64_t token_idx, int dst_rank) const;
  std::vector<Origin> rows_of(int rank_idx) const;
  int64_t choice(const Origin& origin) const;

  layout::Arrangement arrangement_;
  layout::CapacityRule rule_;
  std::vector<int32_t> expert_rank_;
  std::vector<AskedOfRank> asked_;
  std::vector<std::vector<Origin>> wanted_;  ///< by expert: all choices, by (rank, token, choice)
  std::vector<std::vector<Origin>> kept_;    ///< by expert: those that are delivered
  std::vector<std::vector<Origin>> rows_;    ///< by rank
  std::vector<std::vector<std::vector<Term>>> terms_;  ///< by rank and token
};

}  // namespace moe::simt::checker
