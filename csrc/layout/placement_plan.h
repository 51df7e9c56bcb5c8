#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/layer_plan.h"

namespace moe::layout {

/// Plans that make the largest load of a rank small, however loads scatter, once the rows of every
/// expert are shared out between its slots as RankLeveling does.
///
/// Without a present placement, that is plan_layer(). Else a plan with a small sum of the largest
/// load, on the mean over several scatters, and the price of its moves, among: what single moves
/// and swaps that are each worth their price, as SharedLoads sees it, make of the present one; and
/// those of plan_layer() with several reluctances to move. Where slots keep their experts, among
/// what single moves make of the present one, and of no copies at all. Never one that costs more
/// than the present one.
class PlacementPlanner {
 public:
  /// @param rules  Checked by the caller.
  explicit PlacementPlanner(const PlanRules& rules);

  /// @param loads    [num_experts], >= 0
  /// @param present  Experts in slots, as SlotExperts of any number of slots, or empty. Those that
  ///   stay on a rank keep their slots.
  SlotExperts plan(std::span<const double> loads, std::span<const int32_t> present) const;

 private:
  PlanRules rules_;
  std::vector<double> scatters_;  ///< [kNumScatters, num_experts]: factors of loads
};

}  // namespace moe::layout
