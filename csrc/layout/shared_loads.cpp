#include "layout/shared_loads.h"

#include <algorithm>
#include <numeric>

namespace moe::layout {

SharedLoads::SharedLoads(const PlanRules& rules,
                         const SlotExperts& slots,
                         const std::vector<ScatterLoads>& loads)
    : loads_(&loads), rank_loads_(at(rules.num_ranks)), group_of_(loads.size(), -1), begins_{0} {
  std::vector<int32_t> num_copies(loads.size());
  for (const int32_t expert_idx : slots)
    if (expert_idx >= 0)
      ++num_copies[at(expert_idx)];
  for (size_t expert_idx = 0; expert_idx < loads.size(); ++expert_idx)
    if (num_copies[expert_idx] > 1) {
      group_of_[expert_idx] = static_cast<int32_t>(begins_.size()) - 1;
      begins_.push_back(begins_.back() + num_copies[expert_idx]);
    }
  copies_.resize(at(begins_.back()));
  std::vector<int32_t> next = begins_;
  size_t slot = 0;
  for (int32_t rank_idx = 0; rank_idx < rules.num_ranks; ++rank_idx)
    for (int32_t i = 0; i < rules.num_slots; ++i, ++slot) {
      if (slots[slot] < 0)
        continue;
      const size_t expert_idx = at(slots[slot]);
      const float part = 1 / static_cast<float>(num_copies[expert_idx]);
      add(rank_loads_[at(rank_idx)], loads[expert_idx], part);
      if (const int32_t group = group_of_[expert_idx]; group >= 0) {
        Copy& copy = copies_[at(next[at(group)]++)];
        copy.rank_idx = rank_idx;
        add(copy.load, loads[expert_idx], part);
      }
    }
}

void SharedLoads::add(ScatterLoads& to, const ScatterLoads& more, float factor) {
  ScatterLoads sum = to;  // which no other load can be a part of: compilers take several at once
  const ScatterLoads added = more;
  for (size_t i = 0; i < kNumScatters; ++i)
    sum[i] += added[i] * factor;
  to = sum;
}

void SharedLoads::level(int num_rounds) {
  for (int round = 0; round < num_rounds; ++round)
    for (size_t group = 0; group + 1 < begins_.size(); ++group)
      for (int32_t i = begins_[group]; i + 1 < begins_[group + 1]; ++i) {
        Copy& one = copies_[at(i)];
        Copy& other = copies_[at(i + 1)];
        ScatterLoads of_one = rank_loads_[at(one.rank_idx)];
        ScatterLoads of_other = rank_loads_[at(other.rank_idx)];
        ScatterLoads mine = one.load;
        ScatterLoads theirs = other.load;
        for (size_t k = 0; k < kNumScatters; ++k) {
          float given = (of_one[k] - of_other[k]) * 0.5f;
          given = given > mine[k] ? mine[k] : given;
          given = given < -theirs[k] ? -theirs[k] : given;
          mine[k] -= given;
          theirs[k] += given;
          of_one[k] -= given;
          of_other[k] += given;
        }
        rank_loads_[at(one.rank_idx)] = of_one;
        rank_loads_[at(other.rank_idx)] = of_other;
        one.load = mine;
        other.load = theirs;
      }
}

float SharedLoads::largest() const {
  ScatterLoads most{};
  for (const ScatterLoads& of_rank : rank_loads_)
    for (size_t i = 0; i < kNumScatters; ++i)
      most[i] = most[i] < of_rank[i] ? of_rank[i] : most[i];
  return std::accumulate(most.begin(), most.end(), 0.0f);
}

float SharedLoads::of_rank(int32_t rank_idx) const {
  const ScatterLoads& load = rank_loads_[at(rank_idx)];
  return std::accumulate(load.begin(), load.end(), 0.0f);
}

float SharedLoads::of_slot(int32_t expert_idx, int32_t rank_idx) const {
  const ScatterLoads* load = &(*loads_)[at(expert_idx)];
  if (const int32_t group = group_of_[at(expert_idx)]; group >= 0)
    for (int32_t i = begins_[at(group)]; i < begins_[at(group) + 1]; ++i)
      if (copies_[at(i)].rank_idx == rank_idx)
        load = &copies_[at(i)].load;
  return std::accumulate(load->begin(), load->end(), 0.0f);
}

}  // namespace moe::layout
