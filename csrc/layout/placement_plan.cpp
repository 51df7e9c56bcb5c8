#include "layout/placement_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "layout/rank_leveling.h"

namespace moe::layout {

namespace {

constexpr int kNumScatters = 8;
/// Reluctances to move an expert, in means of a rank's load, beside its price.
constexpr double kReluctances[] = {0.0, 0.1};

/// Equally likely numbers in [0, 1), the same on every machine.
class Uniform {
 public:
  double next() {
    state_ += 0x9E3779B97F4A7C15ull;
    uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return static_cast<double>((mixed ^ (mixed >> 31)) >> 11) * 0x1p-53;
  }

 private:
  uint64_t state_ = 0;
};

/// Puts experts that stay on a rank into the slots that they have there.
void keep_slots(std::span<int32_t> slots, std::span<const int32_t> present) {
  for (size_t i = 0; i < std::min(slots.size(), present.size()); ++i) {
    const auto found = std::find(slots.begin(), slots.end(), present[i]);
    if (present[i] >= 0 && found != slots.end())
      std::swap(slots[i], *found);
  }
}

}  // namespace

/// What a plan leads to, on the mean over scatters.
struct PlacementPlanner::Outcome {
  double cost = 0;                ///< the largest load of a rank, and the price of moves
  std::vector<double> slot_load;  ///< [num_ranks * num_slots]
  std::vector<double> rank_load;  ///< [num_ranks]
};

PlacementPlanner::PlacementPlanner(const PlanRules& rules) : rules_(rules) {
  Uniform uniform;
  const int num_drawn = kNumScatters / 2 * rules.num_experts;
  for (int i = 0; i < num_drawn; ++i) {
    // Twelve of them have the variance 1, and are nearly normal.
    double sum = -6;
    for (int k = 0; k < 12; ++k)
      sum += uniform.next();
    scatters_.push_back(std::exp(rules.scatter * sum));
  }
  // The other half is the inverse, so that no expert has more load than planned on the whole.
  for (int i = 0; i < num_drawn; ++i)
    scatters_.push_back(1 / scatters_[static_cast<size_t>(i)]);
}

PlacementPlanner::Outcome PlacementPlanner::outcome(const SlotExperts& slots,
                                                    const LayerLoads& layer) const {
  std::vector<int32_t> slot_rank(slots.size());
  for (size_t slot = 0; slot < slots.size(); ++slot)
    slot_rank[slot] = static_cast<int32_t>(slot) / rules_.num_slots;
  const ReplicaSlots replicas(std::move(slot_rank), slots, rules_.num_ranks, rules_.num_experts);
  // Rows are whole: about a million make the mean.
  const double load_of_row = layer.mean > 0 ? layer.mean / (1 << 20) : 1;
  const double rows_of_load = 1 / load_of_row;
  Outcome result{0,
                 std::vector<double>(slots.size()),
                 std::vector<double>(static_cast<size_t>(rules_.num_ranks))};
  std::vector<int64_t> rows(layer.loads.size());
  const double* scatter = scatters_.data();
  for (int i = 0; i < kNumScatters; ++i) {
    for (size_t e = 0; e < rows.size(); ++e)
      rows[e] = static_cast<int64_t>(layer.loads[e] * *scatter++ * rows_of_load);
    std::vector<int64_t> slot_rows = replicas.split_evenly(rows.data());
    result.cost += static_cast<double>(replicas.level(slot_rows.data()));
    for (size_t slot = 0; slot < slots.size(); ++slot)
      result.slot_load[slot] += static_cast<double>(slot_rows[slot]) * (load_of_row / kNumScatters);
  }
  result.cost *= load_of_row / kNumScatters;
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const auto rank_idx = static_cast<int64_t>(slot) / rules_.num_slots;
    result.rank_load[static_cast<size_t>(rank_idx)] += result.slot_load[slot];
    if (slots[slot] >= 0 && !layer.is_held(rank_idx, slots[slot]))
      result.cost += rules_.move_price;
  }
  return result;
}

/// Plans that take load off the fullest rank: a copy of an expert that has much of it there, on a
/// rank with little load in the place of a copy that is used least, or a swap of experts without
/// copies.
std::vector<SlotExperts> PlacementPlanner::changes(const SlotExperts& slots,
                                                   const Outcome& of_slots,
                                                   const LayerLoads& layer) const {
  constexpr size_t kNumExperts = 2;
  constexpr size_t kNumRanks = 3;
  const auto num_slots = static_cast<size_t>(rules_.num_slots);
  const std::vector<double>& slot_load = of_slots.slot_load;
  std::vector<int32_t> num_copies(layer.loads.size());
  for (const int32_t expert_idx : slots)
    if (expert_idx >= 0)
      ++num_copies[static_cast<size_t>(expert_idx)];
  const auto is_copied = [&](size_t slot) {
    return slots[slot] < 0 || num_copies[static_cast<size_t>(slots[slot])] > 1;
  };
  std::vector<size_t> ranks(of_slots.rank_load.size());
  std::iota(ranks.begin(), ranks.end(), size_t{0});
  std::stable_sort(ranks.begin(), ranks.end(), [&](size_t one, size_t other) {
    return of_slots.rank_load[one] < of_slots.rank_load[other];
  });
  std::vector<size_t> own(num_slots);
  std::iota(own.begin(), own.end(), ranks.back() * num_slots);
  std::stable_sort(own.begin(), own.end(), [&](size_t one, size_t other) {
    return slot_load[one] > slot_load[other];
  });

  std::vector<SlotExperts> result;
  for (const size_t rank_idx : std::span(ranks).first(std::min(kNumRanks, ranks.size() - 1))) {
    const size_t begin = rank_idx * num_slots;
    size_t least_used = begin + num_slots;
    for (size_t slot = begin; slot < begin + num_slots; ++slot)
      if (is_copied(slot) &&
          (least_used == begin + num_slots || slot_load[slot] < slot_load[least_used]))
        least_used = slot;
    const auto first = slots.begin() + static_cast<ptrdiff_t>(begin);
    for (const size_t mine : std::span(own).first(std::min(kNumExperts, num_slots)))
      if (least_used < begin + num_slots && slots[mine] >= 0 &&
          std::find(first, first + rules_.num_slots, slots[mine]) == first + rules_.num_slots) {
        result.push_back(slots);
        result.back()[least_used] = slots[mine];
      }

    const double gap = of_slots.rank_load[ranks.back()] - of_slots.rank_load[rank_idx];
    double most = 0;
    std::pair<size_t, size_t> swapped;
    for (const size_t mine : own)
      for (size_t theirs = begin; theirs < begin + num_slots; ++theirs) {
        const double difference = slot_load[mine] - slot_load[theirs];
        const double gain = std::min(difference, gap - difference);
        if (gain > most && !is_copied(mine) && !is_copied(theirs)) {
          most = gain;
          swapped = {mine, theirs};
        }
      }
    if (most > 0) {
      result.push_back(slots);
      std::swap(result.back()[swapped.first], result.back()[swapped.second]);
    }
  }
  return result;
}

/// Changes a plan by what takes most off its cost, as long as anything does.
PlacementPlanner::Outcome PlacementPlanner::improve(SlotExperts& slots,
                                                    const LayerLoads& layer) const {
  Outcome best = outcome(slots, layer);
  for (int left = 2 * rules_.num_ranks; left > 0; --left) {
    // A change moves an expert at least, and nothing gets below the mean.
    if (best.cost - layer.mean <= rules_.move_price)
      break;
    const double former_cost = best.cost;
    for (SlotExperts& changed : changes(slots, Outcome(best), layer)) {
      Outcome of_changed = outcome(changed, layer);
      if (of_changed.cost < best.cost) {
        best = std::move(of_changed);
        slots = std::move(changed);
      }
    }
    if (best.cost == former_cost)
      break;
  }
  return best;
}

SlotExperts PlacementPlanner::plan(std::span<const double> loads,
                                   std::span<const int32_t> present) const {
  const LayerLoads layer(loads, present, rules_.num_ranks);
  if (layer.is_planned_anew())
    return plan_layer(rules_, layer, 0);

  const auto num_ranks = static_cast<size_t>(rules_.num_ranks);
  const auto num_slots = static_cast<size_t>(rules_.num_slots);
  const size_t num_present = present.size() / num_ranks;
  std::vector<std::pair<double, SlotExperts>> plans;
  if (num_present <= num_slots && std::ranges::find(layer.num_held, 0) == layer.num_held.end()) {
    SlotExperts slots(num_ranks * num_slots, -1);
    for (size_t i = 0; i < present.size(); ++i)
      slots[i / num_present * num_slots + i % num_present] = present[i];
    plans.emplace_back(outcome(slots, layer).cost, slots);
    if (rules_.move_price > 0) {
      const double cost = improve(slots, layer).cost;
      plans.emplace_back(cost, std::move(slots));
    }
  }
  for (const double reluctance : kReluctances) {
    SlotExperts slots = plan_layer(rules_, layer, rules_.move_price + reluctance * layer.mean);
    const double cost = outcome(slots, layer).cost;
    plans.emplace_back(cost, std::move(slots));
  }
  SlotExperts& best =
      std::ranges::min_element(plans, {}, &std::pair<double, SlotExperts>::first)->second;
  for (size_t rank_idx = 0; rank_idx < num_ranks && num_present > 0; ++rank_idx)
    keep_slots(std::span(best).subspan(rank_idx * num_slots, num_slots),
               present.subspan(rank_idx * num_present, num_present));
  return std::move(best);
}

}  // namespace moe::layout
