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

  /// The rows of every expert in equal parts to its slots; what is over, a row each to the first.
  /// @param expert_rows  [num_experts]
  /// @param slot_rows    [num_slots], zero
  void split_evenly(const int64_t* expert_rows, int64_t* slot_rows) const;

  /// See RankLeveling.
  /// @param slot_rows  [num_slots], any split of every expert's rows; overwritten
  /// @param left_out   [num_ranks], not 0 for a rank whose slots have no rows and get none; or null
  /// @return the largest number of rows of any rank.
  int64_t level(int64_t* slot_rows, const uint8_t* left_out = nullptr) const;
  /// The same with the sums by rank, which follow; -1 for a rank that is left out.
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
