#include "layout/layer_plan.h"

#include <algorithm>
#include <bit>
#include <compare>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>

namespace moe::layout {

namespace {

/// Parts of the mean by which a rank counts as fuller for a copy.
constexpr double kConnectedPart = 0.3;
constexpr double kSameNodePart = 0.25;
/// Parts of the mean by which the fullest rank may be above it.
constexpr double kEvenEnough = 0.001;

/// A number with what it is of, in the order of numbers >= 0: sorts several times as fast as a
/// pair.
struct Numbered {
  static constexpr uint64_t kIdxMask = (1 << 17) - 1;

  Numbered(double number, int32_t idx)
      : bits((std::bit_cast<uint64_t>(number) & ~kIdxMask) | static_cast<uint64_t>(idx)) {}
  /// Index from the other end: of equal numbers, those of a higher opposite come first.
  static int32_t opposite(int32_t idx) { return static_cast<int32_t>(kIdxMask) - idx; }
  int32_t idx() const { return static_cast<int32_t>(bits & kIdxMask); }
  auto operator<=>(const Numbered&) const = default;

  uint64_t bits;
};

/// The least of numbers that change one by one: a tree of the lesser of two.
class LeastNumber {
 public:
  explicit LeastNumber(size_t num_numbers)
      : num_leaves_(std::bit_ceil(num_numbers)), nodes_(2 * num_leaves_, none()) {}
  /// Number above every other.
  static Numbered none() { return {std::numeric_limits<double>::infinity(), 0}; }

  void set(Numbered number, int32_t idx) {
    size_t at = num_leaves_ + static_cast<size_t>(idx);
    for (nodes_[at] = number; at > 1; at /= 2)
      nodes_[at / 2].bits = std::min(nodes_[at].bits, nodes_[at ^ 1].bits);
  }
  int32_t idx() const { return nodes_[1].idx(); }

 private:
  size_t num_leaves_;
  std::vector<Numbered> nodes_;
};

}  // namespace

LayerLoads::LayerLoads(std::span<const double> loads_in,
                       std::span<const int32_t> present,
                       int num_ranks_in)
    : loads(loads_in),
      num_ranks(num_ranks_in),
      mean(std::accumulate(loads.begin(), loads.end(), 0.0) / num_ranks) {
  std::vector<Numbered> sorted;
  sorted.reserve(loads.size());
  by_load.reserve(loads.size());
  for (size_t e = 0; e < loads.size(); ++e)
    sorted.emplace_back(loads[e], Numbered::opposite(static_cast<int32_t>(e)));
  std::sort(sorted.begin(), sorted.end());
  for (auto next = sorted.rbegin(); next != sorted.rend(); ++next)
    by_load.push_back(Numbered::opposite(next->idx()));
  if (present.empty())
    return;
  held.resize(loads.size() * static_cast<size_t>(num_ranks));
  holders.resize(held.size());
  num_held.resize(loads.size());
  const size_t num_slots = present.size() / static_cast<size_t>(num_ranks);
  for (size_t rank_idx = 0, i = 0; rank_idx < static_cast<size_t>(num_ranks); ++rank_idx)
    for (const size_t end = i + num_slots; i < end; ++i)
      if (present[i] >= 0) {
        const auto expert_idx = static_cast<size_t>(present[i]);
        const size_t first = expert_idx * static_cast<size_t>(num_ranks);
        held[first + rank_idx] = 1;
        holders[first + static_cast<size_t>(num_held[expert_idx]++)] =
            static_cast<int32_t>(rank_idx);
      }
}

namespace {

/// One plan of a layer in the making.
class LayerPlan {
 public:
  LayerPlan(const PlanRules& rules, const LayerLoads& layer, double reluctance, int64_t most_moves)
      : rules_(rules),
        layer_(layer),
        reluctance_(reluctance),
        num_copies_(layer.loads.size(), 1),
        share_(layer.loads.begin(), layer.loads.end()),
        slots_(at(rules.num_ranks * rules.num_slots), -1),
        ranks_(at(rules.num_ranks)),
        lightest_(ranks_.size()) {
    choose_copies();
    separate_ranks();
    for (int32_t rank_idx = 0; rank_idx < rules.num_ranks; ++rank_idx)
      lightest_.set({0.0, rank_idx}, rank_idx);
    for (const int32_t expert_idx : by_share()) {
      if (num_copies_[at(expert_idx)] == 1)
        put(expert_idx, rank_for(expert_idx));
      else
        place_copies(expert_idx);
      if (num_moves_ > most_moves) {
        slots_.clear();
        return;
      }
    }
    even_out();
    fill_up();
  }

  SlotExperts& slots() { return slots_; }

 private:
  struct Rank {
    double load = 0;  ///< load in equal shares
    int32_t num_filled = 0;
    int32_t component = 0;          ///< equal where copies connect ranks
    int32_t last_expert = -1;       ///< last expert that has copies
    int32_t last_node_expert = -1;  ///< last such expert of the node that begins with this rank
  };

  static size_t at(int64_t idx) { return static_cast<size_t>(idx); }
  int32_t* slots_of(int rank_idx) { return slots_.data() + rank_idx * rules_.num_slots; }
  bool is_full(int rank_idx) const { return ranks_[at(rank_idx)].num_filled == rules_.num_slots; }
  bool is_moved(int rank_idx, int32_t expert_idx) const {
    return !layer_.is_planned_anew() && !layer_.is_held(rank_idx, expert_idx);
  }
  /// Price of an expert on a rank, in load.
  double price(int rank_idx, int32_t expert_idx) const {
    return is_moved(rank_idx, expert_idx) ? reluctance_ : 0.0;
  }
  void put(int32_t expert_idx, int rank_idx) {
    Rank& rank = ranks_[at(rank_idx)];
    slots_of(rank_idx)[rank.num_filled++] = expert_idx;
    rank.load += share_[at(expert_idx)];
    num_moves_ += is_moved(rank_idx, expert_idx) ? 1 : 0;
    lightest_.set(is_full(rank_idx) ? LeastNumber::none() : Numbered(rank.load, rank_idx),
                  rank_idx);
  }

  /// Makes copies of the experts with most load per copy for all slots there are.
  void choose_copies() {
    const auto key = [&](int32_t expert_idx) {
      const bool is_kept = !layer_.is_planned_anew() &&
                           num_copies_[at(expert_idx)] < layer_.num_held[at(expert_idx)];
      return share_[at(expert_idx)] + (is_kept ? reluctance_ : 0.0);
    };
    auto num_left = static_cast<int64_t>(slots_.size()) - rules_.num_experts;
    std::priority_queue<Numbered> next;
    // None but the first can get any as long as nothing is anywhere.
    const auto num_candidates = layer_.is_planned_anew() ? num_left : rules_.num_experts;
    for (const int32_t expert_idx :
         std::span(layer_.by_load).first(at(std::min<int64_t>(num_candidates, rules_.num_experts))))
      if (share_[at(expert_idx)] > 0 && rules_.num_ranks > 1)
        next.emplace(key(expert_idx), expert_idx);
    for (; num_left > 0 && !next.empty(); --num_left) {
      const int32_t expert_idx = next.top().idx();
      next.pop();
      const int32_t num_copies = ++num_copies_[at(expert_idx)];
      share_[at(expert_idx)] = layer_.loads[at(expert_idx)] / num_copies;
      if (num_copies < rules_.num_ranks)
        next.emplace(key(expert_idx), expert_idx);
    }
  }

  /// Experts, those with most load per copy first.
  std::vector<int32_t> by_share() const {
    std::vector<int32_t> copied;
    std::vector<int32_t> others;
    for (const int32_t expert_idx : layer_.by_load)
      (num_copies_[at(expert_idx)] > 1 ? copied : others).push_back(expert_idx);
    const auto is_more = [&](int32_t one, int32_t other) {
      return share_[at(one)] > share_[at(other)];
    };
    std::stable_sort(copied.begin(), copied.end(), is_more);
    std::vector<int32_t> sorted(layer_.by_load.size());
    std::merge(copied.begin(), copied.end(), others.begin(), others.end(), sorted.begin(), is_more);
    return sorted;
  }

  /// @return the rank with a free slot where an expert without copies costs least.
  int rank_for(int32_t expert_idx) {
    int best_rank = lightest_.idx();
    if (layer_.is_planned_anew())
      return best_rank;
    double least = ranks_[at(best_rank)].load + price(best_rank, expert_idx);
    for (const int32_t rank_idx : layer_.holders_of(expert_idx))
      if (!is_full(rank_idx) && ranks_[at(rank_idx)].load < least) {
        best_rank = rank_idx;
        least = ranks_[at(rank_idx)].load;
      }
    return best_rank;
  }

  void place_copies(int32_t expert_idx) {
    int first_rank = -1;
    for (int32_t i = 0; i < num_copies_[at(expert_idx)]; ++i) {
      int best_rank = -1;
      double least = std::numeric_limits<double>::infinity();
      for (int rank_idx = 0; rank_idx < rules_.num_ranks; ++rank_idx) {
        const Rank& rank = ranks_[at(rank_idx)];
        if (is_full(rank_idx) || rank.last_expert == expert_idx)
          continue;
        double cost = rank.load + price(rank_idx, expert_idx);
        if (first_rank >= 0 && rank.component == ranks_[at(first_rank)].component)
          cost += kConnectedPart * layer_.mean;
        if (node_of(rank_idx).last_node_expert == expert_idx)
          cost += kSameNodePart * layer_.mean;
        if (cost < least) {
          least = cost;
          best_rank = rank_idx;
        }
      }
      if (best_rank < 0)
        break;
      put(expert_idx, best_rank);
      ranks_[at(best_rank)].last_expert = expert_idx;
      node_of(best_rank).last_node_expert = expert_idx;
      if (first_rank < 0)
        first_rank = best_rank;
      else
        connect(first_rank, best_rank);
    }
  }

  Rank& node_of(int rank_idx) { return ranks_[at(rank_idx - rank_idx % rules_.ranks_per_node)]; }

  void separate_ranks() {
    for (int rank_idx = 0; rank_idx < rules_.num_ranks; ++rank_idx)
      ranks_[at(rank_idx)].component = rank_idx;
    num_components_ = rules_.num_ranks;
  }

  void connect(int one_rank, int other_rank) {
    const int32_t kept = ranks_[at(one_rank)].component;
    const int32_t former = ranks_[at(other_rank)].component;
    if (kept == former)
      return;
    for (Rank& rank : ranks_)
      if (rank.component == former)
        rank.component = kept;
    if (--num_components_ == 1)
      separate_ranks();
  }

  /// Swaps experts without copies between the rank with most load and those with least.
  void even_out() {
    constexpr int kNumOthers = 4;
    for (int left = 2 * rules_.num_ranks; left > 0; --left) {
      int fullest = 0;
      for (int rank_idx = 1; rank_idx < rules_.num_ranks; ++rank_idx)
        if (ranks_[at(rank_idx)].load > ranks_[at(fullest)].load)
          fullest = rank_idx;
      if (ranks_[at(fullest)].load <= layer_.mean * (1 + kEvenEnough))
        return;
      int other = -1;
      bool has_swapped = false;
      for (int i = 0; i < std::min(kNumOthers, rules_.num_ranks) && !has_swapped; ++i) {
        other = next_lightest(other);
        has_swapped = swap_between(fullest, other);
      }
      if (!has_swapped)
        return;
    }
  }

  /// The rank with least load; or with the least after that of another, of equal ones in ascending
  /// order.
  int next_lightest(int after) const {
    int found = -1;
    double least = std::numeric_limits<double>::infinity();
    for (int rank_idx = 0; rank_idx < rules_.num_ranks; ++rank_idx) {
      const double load = ranks_[at(rank_idx)].load;
      const bool is_after = after < 0 || load > ranks_[at(after)].load ||
                            (load == ranks_[at(after)].load && rank_idx > after);
      if (load < least && is_after) {
        least = load;
        found = rank_idx;
      }
    }
    return found;
  }

  bool swap_between(int full_rank, int other_rank) {
    Rank& full = ranks_[at(full_rank)];
    Rank& other = ranks_[at(other_rank)];
    const double gap = full.load - other.load;
    double most = 1e-9 * layer_.mean;
    int32_t* given = nullptr;
    int32_t* taken = nullptr;
    for (int32_t* mine = slots_of(full_rank); mine != slots_of(full_rank) + full.num_filled; ++mine)
      for (int32_t* theirs = slots_of(other_rank);
           theirs != slots_of(other_rank) + other.num_filled && num_copies_[at(*mine)] == 1;
           ++theirs) {
        const double difference = share_[at(*mine)] - share_[at(*theirs)];
        double gain = std::min(difference, gap - difference);
        if (gain <= most || num_copies_[at(*theirs)] > 1)
          continue;
        gain -= price(other_rank, *mine) + price(full_rank, *theirs) - price(full_rank, *mine) -
                price(other_rank, *theirs);
        if (gain > most) {
          most = gain;
          given = mine;
          taken = theirs;
        }
      }
    if (given == nullptr)
      return false;
    const double difference = share_[at(*given)] - share_[at(*taken)];
    full.load -= difference;
    other.load += difference;
    std::swap(*given, *taken);
    return true;
  }

  /// Fills slots that are left: with what they hold, else with copies that are worth it.
  void fill_up() {
    for (int rank_idx = 0; rank_idx < rules_.num_ranks; ++rank_idx)
      while (!is_full(rank_idx)) {
        const int32_t* const own = slots_of(rank_idx);
        const int32_t* const end = own + ranks_[at(rank_idx)].num_filled;
        int32_t best = -1;
        double most = 0;
        for (const int32_t expert_idx : layer_.by_load) {
          const double gain = share_[at(expert_idx)] / (num_copies_[at(expert_idx)] + 1) -
                              price(rank_idx, expert_idx);
          if (gain > most && std::find(own, end, expert_idx) == end) {
            most = gain;
            best = expert_idx;
          }
        }
        if (best < 0)
          break;
        put(best, rank_idx);
        share_[at(best)] = layer_.loads[at(best)] / ++num_copies_[at(best)];
      }
  }

  const PlanRules& rules_;
  const LayerLoads& layer_;
  double reluctance_;
  std::vector<int32_t> num_copies_;  ///< [num_experts]
  std::vector<double> share_;        ///< [num_experts]: load of each copy
  SlotExperts slots_;  ///< experts of slots: of every rank the first Rank::num_filled are in use
  std::vector<Rank> ranks_;
  int num_components_ = 0;
  int64_t num_moves_ = 0;
  LeastNumber lightest_;  ///< loads of ranks that have a free slot
};

}  // namespace

SlotExperts plan_layer(const PlanRules& rules,
                       const LayerLoads& layer,
                       double reluctance,
                       int64_t most_moves) {
  return std::move(LayerPlan(rules, layer, reluctance, most_moves).slots());
}

}  // namespace moe::layout
