#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace moe::layout {

/// Rules of a plan, alike in every layer.
struct PlanRules {
  int num_experts = 0;
  int num_ranks = 0;
  int num_slots = 0;       ///< slots of every rank; num_ranks * num_slots >= num_experts
  int ranks_per_node = 0;  ///< divides num_ranks
  /// Load that a move of an expert to a rank must take off the largest one to be worth it.
  double move_price = 0;
  /// Standard deviation of the logarithm of later loads over planned ones.
  double scatter = 0;
  /// The first slots of every rank that keep what they hold; together they hold every expert once.
  int num_kept = 0;
};

/// Experts in the slots of all ranks, -1 for an empty one: [num_ranks * num_slots], by rank.
using SlotExperts = std::vector<int32_t>;

/// Loads and present slots of one layer.
struct LayerLoads {
  /// @param loads    [num_experts], >= 0
  /// @param present  Experts in slots, as SlotExperts of any number of slots, or empty.
  LayerLoads(std::span<const double> loads, std::span<const int32_t> present, int num_ranks);

  bool is_planned_anew() const { return num_held.empty(); }
  bool is_held(int64_t rank_idx, int64_t expert_idx) const {
    return held[static_cast<size_t>(expert_idx * num_ranks + rank_idx)] != 0;
  }
  /// The ranks that hold an expert, ascending.
  std::span<const int32_t> holders_of(int32_t expert_idx) const {
    return {holders.data() + int64_t{expert_idx} * num_ranks,
            static_cast<size_t>(num_held[static_cast<size_t>(expert_idx)])};
  }

  std::span<const double> loads;
  int num_ranks;
  double mean;                    ///< mean load of a rank
  std::vector<int32_t> by_load;   ///< experts, those with most load first
  std::vector<uint8_t> held;      ///< [num_experts, num_ranks]: what is present, or empty
  std::vector<int32_t> num_held;  ///< [num_experts], or empty
  std::vector<int32_t> holders;   ///< [num_experts, num_ranks]: the first num_held hold the expert
};

/// Places experts so that ranks have equal loads and can hand on to each other what comes
/// otherwise.
///
/// Rows move between ranks that have slots of one expert, and past them to others. Experts with
/// most load per slot get copies, and all go, those with most load per slot first, to the rank with
/// least load. A rank counts as fuller for a copy where others of that expert lead to it already,
/// as long as any rank is left that they do not lead to, and where its node has a copy; for every
/// expert that it does not hold, by @p reluctance. Swaps of experts without copies even out what is
/// left.
///
/// Example: 2 ranks of 2 slots, loads [6, 2, 2]: expert 0 has a slot on each, [0, 1, 0, 2].
///
/// @param most_moves  Most moves of experts; the result is empty if more would move.
SlotExperts plan_layer(const PlanRules& rules,
                       const LayerLoads& layer,
                       double reluctance,
                       int64_t most_moves = std::numeric_limits<int64_t>::max());

}  // namespace moe::layout
