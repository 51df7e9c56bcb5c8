#include "layout/placement_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "layout/balanced_replicas.h"

namespace moe::layout {

namespace {

constexpr int kNumScatters = 8;
constexpr double kInfinite = std::numeric_limits<double>::infinity();
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

/// Outcome of a plan.
struct Outcome {
  double cost = 0;  ///< the largest load of a rank, a mean over scatters, and the price of moves
  std::vector<int64_t> slot_rows;  ///< [kNumScatters, num_ranks * num_slots]
  std::vector<int64_t> rank_rows;  ///< [kNumScatters, num_ranks]: their sums
};

/// Holds plans of one layer against its scattered loads.
class LayerTrials {
 public:
  /// @param scatters  [kNumScatters, num_experts]
  LayerTrials(const PlanRules& rules, const LayerLoads& layer, const std::vector<double>& scatters)
      : rules_(rules), layer_(layer), load_of_row_(layer.mean / kMeanRows) {
    if (!std::isnormal(load_of_row_))
      load_of_row_ = 1;  // no load, or too little to divide by
    for (int32_t rank_idx = 0; rank_idx < rules.num_ranks; ++rank_idx)
      slot_rank_.insert(slot_rank_.end(), static_cast<size_t>(rules.num_slots), rank_idx);
    const double rows_of_load = 1 / load_of_row_;
    const double* scatter = scatters.data();
    for (int i = 0; i < kNumScatters; ++i) {
      int64_t num_rows = 0;
      for (const double load : layer.loads) {
        rows_.push_back(static_cast<int64_t>(load * *scatter++ * rows_of_load));
        num_rows += rows_.back();
      }
      mean_rows_[i] = num_rows / rules.num_ranks;
    }
  }

  /// @param limit  What costs more may come out as anything more.
  Outcome outcome(const SlotExperts& slots, double limit = kInfinite) const;

  /// Puts a copy into one empty slot after the other: of what has most rows on the fullest rank
  /// that has something to give, to the rank with least load that can take it.
  SlotExperts filled(SlotExperts slots) const;

  /// Changes a plan by what takes most off its cost, as long as anything does.
  /// @return its cost.
  double improve(SlotExperts& slots, Outcome of_slots) const;

 private:
  static constexpr double kMeanRows = 1 << 20;  // rows are whole: about a million make the mean

  /// The cost of @p slots, which changes of @p former have made, whose rows are nearly shared out
  /// as well as they can be.
  double cost_of_change(const SlotExperts& slots,
                        double limit,
                        const SlotExperts& former,
                        const Outcome& of_former) const;
  std::vector<SlotExperts> changes(const SlotExperts& slots, const Outcome& of_slots) const;

  /// @param share_out  Returns the largest load of a rank in a scatter, in rows.
  template <typename ShareOut>
  double cost(const SlotExperts& slots, double limit, ShareOut&& share_out) const;
  ReplicaSlots replicas_of(const SlotExperts& slots) const {
    return {slot_rank_, slots, rules_.num_ranks, rules_.num_experts};
  }

  const PlanRules& rules_;
  const LayerLoads& layer_;
  double load_of_row_;
  std::vector<int32_t> slot_rank_;
  std::vector<int64_t> rows_;        ///< [kNumScatters, num_experts]
  int64_t mean_rows_[kNumScatters];  ///< of a rank
};

template <typename ShareOut>
double LayerTrials::cost(const SlotExperts& slots, double limit, ShareOut&& share_out) const {
  double price = 0;
  for (size_t slot = 0; slot < slots.size() && rules_.move_price > 0; ++slot)
    if (slots[slot] >= 0 && !layer_.is_held(slot_rank_[slot], slots[slot]))
      price += rules_.move_price;
  int64_t largest_rows = std::accumulate(mean_rows_, mean_rows_ + kNumScatters, int64_t{0});
  const auto cost = [&] {
    return static_cast<double>(largest_rows) * (load_of_row_ / kNumScatters) + price;
  };
  for (size_t i = 0; i < kNumScatters && cost() <= limit; ++i)
    largest_rows += share_out(i) - mean_rows_[i];
  return cost();
}

Outcome LayerTrials::outcome(const SlotExperts& slots, double limit) const {
  const auto num_ranks = static_cast<size_t>(rules_.num_ranks);
  const ReplicaSlots replicas = replicas_of(slots);
  Outcome result;
  result.slot_rows.resize(kNumScatters * slots.size());
  result.rank_rows.resize(kNumScatters * num_ranks);
  result.cost = cost(slots, limit, [&](size_t i) {
    int64_t* const slot_rows = result.slot_rows.data() + i * slots.size();
    int64_t* const rank_rows = result.rank_rows.data() + i * num_ranks;
    replicas.split_evenly(rows_.data() + i * layer_.loads.size(), slot_rows);
    replicas.add_by_rank(slot_rows, rank_rows);
    return replicas.level(slot_rows, rank_rows);
  });
  return result;
}

double LayerTrials::cost_of_change(const SlotExperts& slots,
                                   double limit,
                                   const SlotExperts& former,
                                   const Outcome& of_former) const {
  const auto num_ranks = static_cast<size_t>(rules_.num_ranks);
  std::vector<size_t> changed;
  for (size_t slot = 0; slot < slots.size(); ++slot)
    if (former[slot] != slots[slot])
      changed.push_back(slot);
  const ReplicaSlots replicas = replicas_of(slots);
  std::vector<int64_t> slot_rows(slots.size());
  std::vector<int64_t> rank_rows(num_ranks);
  return cost(slots, limit, [&](size_t i) {
    const int64_t* const former_rows = of_former.slot_rows.data() + i * slots.size();
    std::copy_n(former_rows, slots.size(), slot_rows.begin());
    std::copy_n(of_former.rank_rows.data() + i * num_ranks, num_ranks, rank_rows.begin());
    const auto add = [&](size_t slot, int64_t num_rows) {
      slot_rows[slot] += num_rows;
      rank_rows[static_cast<size_t>(slot_rank_[slot])] += num_rows;
    };
    for (const size_t slot : changed)
      add(slot, -former_rows[slot]);
    for (const size_t slot : changed)
      if (const int32_t expert_idx = former[slot]; expert_idx >= 0)
        add(static_cast<size_t>(replicas.of_expert(expert_idx).front()), former_rows[slot]);
    return replicas.level(slot_rows.data(), rank_rows.data());
  });
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

/// Plans that take load off the fullest rank: a copy of an expert that has much of it there, on a
/// rank with little load in the place of a copy that is used least, or a swap of experts without
/// copies.
std::vector<SlotExperts> LayerTrials::changes(const SlotExperts& slots,
                                              const Outcome& of_slots) const {
  constexpr size_t kNumExperts = 2;
  constexpr size_t kNumRanks = 3;
  const auto num_slots = static_cast<size_t>(rules_.num_slots);
  // Rows of all scatters.
  std::vector<int64_t> slot_load(slots.size());
  std::vector<int64_t> rank_load(static_cast<size_t>(rules_.num_ranks));
  for (size_t i = 0; i < kNumScatters; ++i) {
    const auto add = [i](const std::vector<int64_t>& rows, std::vector<int64_t>& loads) {
      for (size_t at = 0; at < loads.size(); ++at)
        loads[at] += rows[i * loads.size() + at];
    };
    add(of_slots.slot_rows, slot_load);
    add(of_slots.rank_rows, rank_load);
  }
  std::vector<int32_t> num_copies(layer_.loads.size());
  for (const int32_t expert_idx : slots)
    if (expert_idx >= 0)
      ++num_copies[static_cast<size_t>(expert_idx)];
  const auto is_copied = [&](size_t slot) {
    return slots[slot] < 0 || num_copies[static_cast<size_t>(slots[slot])] > 1;
  };
  std::vector<size_t> ranks(rank_load.size());
  std::iota(ranks.begin(), ranks.end(), size_t{0});
  std::stable_sort(ranks.begin(), ranks.end(), [&](size_t one, size_t other) {
    return rank_load[one] < rank_load[other];
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
    for (size_t slot = begin + static_cast<size_t>(rules_.num_kept); slot < begin + num_slots;
         ++slot)
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

    if (rules_.num_kept > 0)
      continue;  // what has no copy stays where it is
    const int64_t gap = rank_load[ranks.back()] - rank_load[rank_idx];
    int64_t most = 0;
    std::pair<size_t, size_t> swapped;
    for (const size_t mine : own)
      for (size_t theirs = begin; theirs < begin + num_slots; ++theirs) {
        const int64_t difference = slot_load[mine] - slot_load[theirs];
        const int64_t gain = std::min(difference, gap - difference);
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

double LayerTrials::improve(SlotExperts& slots, Outcome of_slots) const {
  double least = of_slots.cost;
  for (int left = 2 * rules_.num_ranks; left > 0; --left) {
    // A change moves an expert at least, and nothing gets below the mean.
    if (least - layer_.mean <= rules_.move_price)
      break;
    const SlotExperts former = slots;
    for (SlotExperts& changed : changes(former, of_slots)) {
      const double cost = cost_of_change(changed, least, former, of_slots);
      if (cost < least) {
        least = cost;
        slots = std::move(changed);
      }
    }
    if (slots == former)
      break;
    // From equal shares: what is left of the former plan's does not say which slots are of use.
    of_slots = outcome(slots);
  }
  return least;
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
  SlotExperts best;
  double least = kInfinite;
  SlotExperts kept;
  if (num_present <= num_slots && std::ranges::find(layer.num_held, 0) == layer.num_held.end()) {
    kept.assign(num_ranks * num_slots, -1);
    for (size_t i = 0; i < present.size(); ++i)
      kept[i / num_present * num_slots + i % num_present] = present[i];
  }
  if (rules_.num_kept > 0) {
    best = kept;
    least = trials.improve(best, trials.outcome(kept));
    SlotExperts bare = kept;
    for (size_t slot = 0; slot < bare.size(); ++slot)
      if (slot % num_slots >= static_cast<size_t>(rules_.num_kept))
        bare[slot] = -1;
    for (SlotExperts slots : {bare, trials.filled(bare)})
      if (const double cost = trials.improve(slots, trials.outcome(slots)); cost < least) {
        least = cost;
        best = std::move(slots);
      }
  } else if (!kept.empty() && rules_.move_price > 0) {
    best = kept;
    least = trials.improve(best, trials.outcome(kept));
  }
  for (const double reluctance : rules_.num_kept > 0 ? std::span<const double>() : kReluctances) {
    SlotExperts slots = plan_layer(rules_, layer, rules_.move_price + reluctance * layer.mean);
    const double cost = trials.outcome(slots, least).cost;
    if (cost < least) {
      least = cost;
      best = std::move(slots);
    }
  }
  // It seldom wins where moves cost nothing, and is seen through the sooner for coming last.
  if (!kept.empty() && rules_.num_kept == 0 && rules_.move_price == 0 &&
      trials.outcome(kept, least).cost <= least)
    best = std::move(kept);
  for (size_t rank_idx = 0; rank_idx < num_ranks && num_present > 0; ++rank_idx)
    keep_slots(std::span(best).subspan(rank_idx * num_slots, num_slots),
               present.subspan(rank_idx * num_present, num_present));
  return best;
}

}  // namespace moe::layout
