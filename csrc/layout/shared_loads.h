#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/layer_plan.h"

namespace moe::layout {

/// Loads that differ from planned ones as later loads may.
constexpr int kNumScatters = 8;
/// A load in every scatter.
using ScatterLoads = std::array<float, kNumScatters>;

/// Loads of ranks in every scatter where slots of an expert share its load, nearly as well as they
/// can: a quick look at what RankLeveling works out.
///
/// Neighbors, two slots of one expert, even out the loads of their ranks as far as their own load
/// goes, one pair after the other. Each round brings ranks nearer to where no pair can.
class SharedLoads {
 public:
  /// All slots of an expert have the same load.
  /// @param loads  [num_experts]; outlives this.
  SharedLoads(const PlanRules& rules,
              const SlotExperts& slots,
              const std::vector<ScatterLoads>& loads);

  void level(int num_rounds);

  /// Largest load of a rank, summed over scatters.
  float largest() const;
  /// Load of a rank, and of an expert's slot on it, summed over scatters.
  float of_rank(int32_t rank_idx) const;
  float of_slot(int32_t expert_idx, int32_t rank_idx) const;
  bool is_copied(int32_t expert_idx) const { return group_of_[at(expert_idx)] >= 0; }

 private:
  /// A slot of an expert that has copies.
  struct Copy {
    int32_t rank_idx;
    ScatterLoads load;
  };

  static size_t at(int32_t idx) { return static_cast<size_t>(idx); }
  static void add(ScatterLoads& to, const ScatterLoads& more, float factor = 1);

  const std::vector<ScatterLoads>* loads_;
  std::vector<ScatterLoads> rank_loads_;
  std::vector<int32_t> group_of_;  ///< [num_experts], into begins_; -1: has no copies
  std::vector<int32_t> begins_;    ///< [groups + 1], into copies_
  std::vector<Copy> copies_;       ///< copies; those of an expert follow each other
};

}  // namespace moe::layout
