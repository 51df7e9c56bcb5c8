#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/balanced_replicas.h"

namespace moe::layout {

/// The arrays of a ReplicaTable, made once for a placement.
class ReplicaSlots {
 public:
  /// @param slot_rank    [num_slots], ascending
  /// @param slot_expert  [num_slots], -1 for an empty one
  ReplicaSlots(std::vector<int32_t> slot_rank,
               std::vector<int32_t> slot_expert,
               int num_ranks,
               int num_experts);

  int num_ranks() const { return static_cast<int>(rank_begin_.size()) - 1; }
  int num_experts() const { return static_cast<int>(expert_begin_.size()) - 1; }
  /// The slots of one expert, ascending; so do their ranks.
  std::span<const int32_t> of_expert(int expert_idx) const {
    const int32_t* const begins = expert_begin_.data() + expert_idx;
    return {expert_slots_.data() + begins[0], expert_slots_.data() + begins[1]};
  }
  ReplicaTable table() const;

  /// Splits the rows of every expert evenly over its slots; the first slots take the remainder, a
  /// row each.
  /// @param expert_rows  [num_experts]
  /// @param slot_rows    [num_slots], zero
  void split_evenly(const int64_t* expert_rows, int64_t* slot_rows) const;

  /// See RankLeveling.
  /// @param slot_rows  [num_slots], any split of every expert's rows; overwritten
  /// @param left_out   [num_ranks], nonzero for a rank that has no rows and gets none; or null
  /// @return the largest number of rows of any rank.
  int64_t level(int64_t* slot_rows, const uint8_t* left_out = nullptr) const;
  /// The same, for a caller that has the sums by rank (-1: left out); both arrays are updated.
  int64_t level(int64_t* slot_rows, int64_t* rank_rows) const;
  /// @param rank_rows  [num_ranks], zero: becomes the sums of @p slot_rows by rank
  void add_by_rank(const int64_t* slot_rows, int64_t* rank_rows) const;

 private:
  std::vector<int32_t> slot_rank_;
  std::vector<int32_t> slot_expert_;
  std::vector<int32_t> expert_begin_;
  std::vector<int32_t> expert_slots_;
  std::vector<int32_t> rank_begin_;
  std::vector<int32_t> shared_slots_;
};

}  // namespace moe::layout
