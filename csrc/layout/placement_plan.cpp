#include "layout/placement_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "layout/replica_slots.h"
#include "layout/shared_loads.h"

namespace moe::layout {

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
/// Reluctance to move an expert, in means of a rank's load, beside its price.
constexpr double kReluctance = 0.1;

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

/// Puts what lies on each rank into as many slots, others than its own only where these are fewer.
/// @return empty where a rank holds more experts than slots.
SlotExperts in_slots(std::span<const int32_t> present, size_t num_ranks, size_t num_slots) {
  const size_t num_present = present.size() / num_ranks;
  SlotExperts kept(num_ranks * num_slots, -1);
  for (size_t rank_idx = 0; rank_idx < num_ranks; ++rank_idx) {
    const auto own = present.subspan(rank_idx * num_present, num_present);
    const auto slots = std::span(kept).subspan(rank_idx * num_slots, num_slots);
    const size_t num_same = std::min(num_present, num_slots);
    std::ranges::copy(own.first(num_same), slots.begin());
    for (const int32_t expert_idx : own.subspan(num_same)) {
      const auto room = expert_idx < 0 ? slots.begin() : std::ranges::find(slots, -1);
      if (room == slots.end())
        return {};
      if (expert_idx >= 0)
        *room = expert_idx;
    }
  }
  return kept;
}

/// Puts experts that stay on a rank into the slots that they have there.
void keep_slots(std::span<int32_t> slots, std::span<const int32_t> present) {
  for (size_t i = 0; i < std::min(slots.size(), present.size()); ++i) {
    const auto found = std::find(slots.begin(), slots.end(), present[i]);
    if (present[i] >= 0 && found != slots.end())
      std::swap(slots[i], *found);
  }
}

/// A change of a plan: other experts in one slot or two.
struct Change {
  struct OfSlot {
    size_t slot;
    int32_t expert_idx;
  };

  std::array<OfSlot, 2> of_slots;
  size_t num_slots;

  std::span<const OfSlot> changed() const { return std::span(of_slots).first(num_slots); }
};

/// Holds plans of one layer against its scattered loads.
class LayerTrials {
 public:
  /// @param scatters  [kNumScatters, num_experts]
  LayerTrials(const PlanRules& rules, const LayerLoads& layer, const std::vector<double>& scatters)
      : rules_(rules),
        layer_(layer),
        load_of_row_(layer.mean / kMeanRows),
        rows_(kNumScatters * layer.loads.size()),
        loads_(layer.loads.size()) {
    if (!std::isnormal(load_of_row_))
      load_of_row_ = 1;  // no load, or too little to divide by
    for (int32_t rank_idx = 0; rank_idx < rules.num_ranks; ++rank_idx)
      slot_rank_.insert(slot_rank_.end(), static_cast<size_t>(rules.num_slots), rank_idx);
    const double rows_of_load = 1 / load_of_row_;
    const double* scatter = scatters.data();
    for (size_t i = 0; i < kNumScatters; ++i) {
      int64_t num_rows = 0;
      for (size_t e = 0; e < layer.loads.size(); ++e) {
        const auto rows = static_cast<int64_t>(layer.loads[e] * *scatter++ * rows_of_load);
        rows_[i * layer.loads.size() + e] = rows;
        num_rows += rows;
        loads_[e][i] = static_cast<float>(rows);
      }
      mean_rows_[i] = num_rows / rules.num_ranks;
    }
  }

  /// @return the cost of a plan, once all is shared out as well as it can be: the largest load of a
  /// rank, a mean over scatters, and the price of moves. What is above @p limit may come out as
  /// anything more.
  double cost(const SlotExperts& slots, double limit = kInfinite) const;

  /// Puts a copy into one empty slot after the other: of what has most rows on the fullest rank
  /// that has something to give, to the rank with least load that can take it.
  SlotExperts filled(SlotExperts slots) const;

  /// @return a cost that a plan does not exceed, by a few rounds of sharing.
  double most_cost(const SlotExperts& slots) const {
    return most_cost(shared(slots), num_moves(slots));
  }

  /// Changes a plan by what takes something off its cost at a look, as long as anything does.
  /// @return its most_cost().
  double improve(SlotExperts& slots) const;

 private:
  static constexpr double kMeanRows = 1 << 20;  // rows are whole: about a million make the mean

  SharedLoads shared(const SlotExperts& slots) const {
    constexpr int kNumRounds = 6;
    SharedLoads loads(rules_, slots, loads_);
    loads.level(kNumRounds);
    return loads;
  }
  std::vector<Change> changes(const SlotExperts& slots, const SharedLoads& loads) const;

  int64_t is_moved(size_t slot, int32_t expert_idx) const {
    return expert_idx >= 0 && !layer_.is_held(slot_rank_[slot], expert_idx) ? 1 : 0;
  }
  int64_t num_moves(const SlotExperts& slots) const {
    int64_t found = 0;
    for (size_t slot = 0; slot < slots.size() && rules_.move_price > 0; ++slot)
      found += is_moved(slot, slots[slot]);
    return found;
  }
  /// The cost of a plan.
  /// @param num_rows  Rows of the fullest rank in all scatters.
  double cost_of(double num_rows, int64_t num_moves) const {
    return num_rows * (load_of_row_ / kNumScatters) +
           static_cast<double>(num_moves) * rules_.move_price;
  }
  double most_cost(const SharedLoads& loads, int64_t num_moves) const {
    constexpr double kRounding = 1e-5;
    return cost_of(loads.largest() * (1 + kRounding), num_moves);
  }
  ReplicaSlots replicas_of(const SlotExperts& slots) const {
    return {slot_rank_, slots, rules_.num_ranks, rules_.num_experts};
  }

  const PlanRules& rules_;
  const LayerLoads& layer_;
  double load_of_row_;
  std::vector<int32_t> slot_rank_;
  std::vector<int64_t> rows_;                    ///< [kNumScatters, num_experts]
  std::array<int64_t, kNumScatters> mean_rows_;  ///< mean number of rows of a rank
  std::vector<ScatterLoads> loads_;              ///< [num_experts]: the rows
};

double LayerTrials::cost(const SlotExperts& slots, double limit) const {
  const int64_t moves = num_moves(slots);
  const ReplicaSlots replicas = replicas_of(slots);
  std::vector<int64_t> slot_rows(slots.size());
  int64_t num_rows = std::accumulate(mean_rows_.begin(), mean_rows_.end(), int64_t{0});
  const auto cost = [&] { return cost_of(static_cast<double>(num_rows), moves); };
  for (size_t i = 0; i < kNumScatters && cost() <= limit; ++i) {
    replicas.split_evenly(rows_.data() + i * layer_.loads.size(), slot_rows.data());
    num_rows += replicas.level(slot_rows.data()) - mean_rows_[i];
  }
  return cost();
}

SlotExperts LayerTrials::filled(SlotExperts slots) const {
  const auto num_slots = static_cast<size_t>(rules_.num_slots);
  std::vector<int64_t> expert_rows;
  for (const double load : layer_.loads)
    expert_rows.push_back(static_cast<int64_t>(load / load_of_row_));
  std::vector<int64_t> slot_rows(slots.size());
  std::vector<int64_t> rank_rows(static_cast<size_t>(rules_.num_ranks));
  // Rows of its rank, its own, and a slot, those with most last but of equal ones the first.
  std::vector<std::tuple<int64_t, int64_t, ptrdiff_t>> givers;
  std::vector<size_t> takers(rank_rows.size());
  std::iota(takers.begin(), takers.end(), size_t{0});
  for (bool is_changed = true; is_changed;) {
    const ReplicaSlots replicas = replicas_of(slots);
    std::ranges::fill(slot_rows, 0);
    std::ranges::fill(rank_rows, 0);
    replicas.split_evenly(expert_rows.data(), slot_rows.data());
    replicas.add_by_rank(slot_rows.data(), rank_rows.data());
    replicas.level(slot_rows.data(), rank_rows.data());
    givers.clear();
    for (size_t slot = 0; slot < slots.size(); ++slot)
      if (slot_rows[slot] > 0)
        givers.emplace_back(rank_rows[static_cast<size_t>(slot_rank_[slot])],
                            slot_rows[slot],
                            -static_cast<ptrdiff_t>(slot));
    std::ranges::make_heap(givers);
    std::ranges::sort(
        takers, {}, [&](size_t rank_idx) { return std::tuple(rank_rows[rank_idx], rank_idx); });
    is_changed = false;
    for (; !givers.empty() && !is_changed; givers.pop_back()) {
      std::ranges::pop_heap(givers);
      const auto [most_rows, _, slot] = givers.back();
      const int32_t expert_idx = slots[static_cast<size_t>(-slot)];
      for (const size_t rank_idx : takers) {
        const auto own = std::span(slots).subspan(rank_idx * num_slots, num_slots);
        const auto room = std::ranges::find(own, -1);
        if (rank_rows[rank_idx] >= most_rows)
          break;
        if (room != own.end() && std::ranges::find(own, expert_idx) == own.end()) {
          *room = expert_idx;
          is_changed = true;
          break;
        }
      }
    }
  }
  return slots;
}

/// Changes that take load off the fullest rank: a copy of the expert that has most there, on a rank
/// with little load in the place of a copy that is used least, or a swap of experts without copies.
std::vector<Change> LayerTrials::changes(const SlotExperts& slots, const SharedLoads& loads) const {
  constexpr size_t kNumRanks = 3;
  const auto num_slots = static_cast<size_t>(rules_.num_slots);
  const auto load_of = [&](size_t slot) {
    return slots[slot] < 0 ? 0.0f : loads.of_slot(slots[slot], slot_rank_[slot]);
  };
  const auto loads_of = [&](size_t rank_idx) {
    std::vector<float> found;
    for (size_t slot = rank_idx * num_slots; slot < (rank_idx + 1) * num_slots; ++slot)
      found.push_back(load_of(slot));
    return found;
  };
  const auto is_copied = [&](size_t slot) {
    return slots[slot] < 0 || loads.is_copied(slots[slot]);
  };
  std::vector<float> rank_load;
  for (int32_t rank_idx = 0; rank_idx < rules_.num_ranks; ++rank_idx)
    rank_load.push_back(loads.of_rank(rank_idx));
  const auto fullest = static_cast<size_t>(std::ranges::max_element(rank_load) - rank_load.begin());
  std::vector<size_t> ranks(rank_load.size());
  std::iota(ranks.begin(), ranks.end(), size_t{0});
  const size_t num_others = std::min(kNumRanks, ranks.size() - 1);
  std::ranges::partial_sort(
      ranks, ranks.begin() + static_cast<ptrdiff_t>(num_others), {}, [&](size_t rank_idx) {
        return std::pair(rank_load[rank_idx], rank_idx);
      });
  const std::vector<float> own = loads_of(fullest);
  const size_t full = fullest * num_slots;
  const size_t most_used = full + static_cast<size_t>(std::ranges::max_element(own) - own.begin());

  std::vector<Change> result;
  for (const size_t rank_idx : std::span(ranks).first(num_others)) {
    const size_t begin = rank_idx * num_slots;
    const std::vector<float> theirs = loads_of(rank_idx);
    size_t least_used = num_slots;
    for (auto i = static_cast<size_t>(rules_.num_kept); i < num_slots; ++i)
      if (is_copied(begin + i) && (least_used == num_slots || theirs[i] < theirs[least_used]))
        least_used = i;
    const auto first = slots.begin() + static_cast<ptrdiff_t>(begin);
    if (least_used < num_slots && slots[most_used] >= 0 &&
        std::find(first, first + rules_.num_slots, slots[most_used]) == first + rules_.num_slots)
      result.push_back({{{{begin + least_used, slots[most_used]}}}, 1});

    if (rules_.num_kept > 0)
      continue;  // what has no copy stays where it is
    const float gap = rank_load[fullest] - rank_load[rank_idx];
    float most = 0;
    Change swap{};
    for (size_t i = 0; i < num_slots; ++i)
      for (size_t k = 0; k < num_slots && !is_copied(full + i); ++k) {
        const float difference = own[i] - theirs[k];
        const float gain = std::min(difference, gap - difference);
        if (gain > most && !is_copied(begin + k)) {
          most = gain;
          swap = {{{{full + i, slots[begin + k]}, {begin + k, slots[full + i]}}}, 2};
        }
      }
    if (most > 0)
      result.push_back(swap);
  }
  return result;
}

double LayerTrials::improve(SlotExperts& slots) const {
  SharedLoads loads = shared(slots);
  double least = most_cost(loads, num_moves(slots));
  for (int left = 2 * rules_.num_ranks; left > 0; --left) {
    // A change moves an expert at least, and nothing gets below the mean.
    if (least - layer_.mean <= rules_.move_price)
      break;
    const bool is_changed = std::ranges::any_of(changes(slots, loads), [&](const Change& change) {
      SlotExperts changed = slots;
      for (const auto& [slot, expert_idx] : change.changed())
        changed[slot] = expert_idx;
      SharedLoads of_changed = shared(changed);
      const double cost = most_cost(of_changed, num_moves(changed));
      if (cost >= least)
        return false;
      least = cost;
      slots = std::move(changed);
      loads = std::move(of_changed);
      return true;
    });
    if (!is_changed)
      break;
  }
  return least;
}

/// A plan, empty for none, and its LayerTrials::most_cost().
struct PlanAtALook {
  SlotExperts slots;
  double cost = kInfinite;
};

/// A plan that goes by what lies where only in being more or less reluctant to move it.
/// @param limit  Cost above which the result may be empty.
PlanAtALook plan_reluctantly(const PlanRules& rules,
                             const LayerLoads& layer,
                             const LayerTrials& trials,
                             double limit) {
  // Nothing gets below the mean.
  const double most_moves =
      rules.move_price > 0 ? (limit - layer.mean) / rules.move_price : kInfinite;
  const auto plan = [&](double reluctance) {
    PlanAtALook made;
    made.slots = plan_layer(rules,
                            layer,
                            rules.move_price + reluctance,
                            static_cast<int64_t>(std::min(most_moves, 0x1p62)));
    if (!made.slots.empty())
      made.cost = trials.most_cost(made.slots);
    return made;
  };
  PlanAtALook reluctant = plan(kReluctance * layer.mean);
  PlanAtALook willing = plan(0);
  if (willing.slots.empty() || reluctant.slots.empty())
    return willing.slots.empty() ? reluctant : willing;
  return willing.cost < reluctant.cost ? willing : reluctant;
}

}  // namespace

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

SlotExperts PlacementPlanner::plan(std::span<const double> loads,
                                   std::span<const int32_t> present) const {
  const LayerLoads layer(loads, present, rules_.num_ranks);
  if (layer.is_planned_anew())
    return plan_layer(rules_, layer, 0);

  const auto num_ranks = static_cast<size_t>(rules_.num_ranks);
  const auto num_slots = static_cast<size_t>(rules_.num_slots);
  const size_t num_present = present.size() / num_ranks;
  const LayerTrials trials(rules_, layer, scatters_);
  SlotExperts kept;
  if (std::ranges::find(layer.num_held, 0) == layer.num_held.end())
    kept = in_slots(present, num_ranks, num_slots);
  PlanAtALook best;
  PlanAtALook other;
  if (!kept.empty() && (rules_.num_kept > 0 || rules_.move_price > 0)) {
    best.slots = kept;
    best.cost = trials.improve(best.slots);
  }
  if (rules_.num_kept > 0) {
    other.slots = kept;
    for (size_t slot = 0; slot < other.slots.size(); ++slot)
      if (slot % num_slots >= static_cast<size_t>(rules_.num_kept))
        other.slots[slot] = -1;
    other.slots = trials.filled(std::move(other.slots));
    other.cost = trials.improve(other.slots);
  } else {
    other = plan_reluctantly(rules_, layer, trials, best.cost);
  }
  if (best.slots.empty() || (!other.slots.empty() && other.cost < best.cost))
    best = std::move(other);
  // The present one seldom wins, and need not be seen through.
  if (!kept.empty() && kept != best.slots) {
    const double cost = trials.cost(kept, best.cost);
    if (cost <= best.cost && cost <= trials.cost(best.slots))
      best.slots = std::move(kept);
  }
  for (size_t rank_idx = 0; rank_idx < num_ranks && num_present > 0; ++rank_idx)
    keep_slots(std::span(best.slots).subspan(rank_idx * num_slots, num_slots),
               present.subspan(rank_idx * num_present, num_present));
  return best.slots;
}

}  // namespace moe::layout
