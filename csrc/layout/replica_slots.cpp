#include "layout/replica_slots.h"

#include <utility>

namespace moe::layout {

ReplicaSlots::ReplicaSlots(std::vector<int32_t> slot_rank,
                           std::vector<int32_t> slot_expert,
                           int num_ranks,
                           int num_experts)
    : slot_rank_(std::move(slot_rank)),
      slot_expert_(std::move(slot_expert)),
      expert_begin_(static_cast<size_t>(num_experts) + 1),
      rank_begin_(static_cast<size_t>(num_ranks) + 1) {
  for (const int32_t expert_idx : slot_expert_)
    if (expert_idx >= 0)
      ++expert_begin_[static_cast<size_t>(expert_idx) + 1];
  for (size_t e = 1; e < expert_begin_.size(); ++e)
    expert_begin_[e] += expert_begin_[e - 1];
  expert_slots_.resize(static_cast<size_t>(expert_begin_.back()));
  std::vector<int32_t> next = expert_begin_;
  for (size_t slot = 0; slot < slot_expert_.size(); ++slot)
    if (slot_expert_[slot] >= 0)
      expert_slots_[static_cast<size_t>(next[static_cast<size_t>(slot_expert_[slot])]++)] =
          static_cast<int32_t>(slot);

  for (size_t slot = 0; slot < slot_expert_.size(); ++slot)
    if (slot_expert_[slot] >= 0 && of_expert(slot_expert_[slot]).size() > 1) {
      shared_slots_.push_back(static_cast<int32_t>(slot));
      ++rank_begin_[static_cast<size_t>(slot_rank_[slot]) + 1];
    }
  for (size_t rank_idx = 1; rank_idx < rank_begin_.size(); ++rank_idx)
    rank_begin_[rank_idx] += rank_begin_[rank_idx - 1];
}

ReplicaTable ReplicaSlots::table() const {
  return {num_ranks(),
          slot_rank_.data(),
          slot_expert_.data(),
          expert_begin_.data(),
          expert_slots_.data(),
          rank_begin_.data(),
          shared_slots_.data()};
}

void ReplicaSlots::split_evenly(const int64_t* expert_rows, int64_t* slot_rows) const {
  for (int expert_idx = 0; expert_idx < num_experts(); ++expert_idx) {
    const std::span<const int32_t> slots = of_expert(expert_idx);
    const auto num_slots = static_cast<int64_t>(slots.size());
    const int64_t num_rows = expert_rows[expert_idx];
    slot_rows[slots.front()] = num_rows;
    // No division for a single slot, the usual case: it would take longer than the rest.
    for (int64_t i = 0; i < num_slots && num_slots > 1; ++i)
      slot_rows[slots[static_cast<size_t>(i)]] = num_rows / num_slots + (i < num_rows % num_slots);
  }
}

void ReplicaSlots::add_by_rank(const int64_t* slot_rows, int64_t* rank_rows) const {
  for (size_t slot = 0; slot < slot_rank_.size(); ++slot)
    rank_rows[slot_rank_[slot]] += slot_rows[slot];
}

int64_t ReplicaSlots::level(int64_t* slot_rows, int64_t* rank_rows) const {
  std::vector<int32_t> words(static_cast<size_t>(RankLeveling<HostMemory>::num_words(num_ranks())));
  return RankLeveling<HostMemory>{table(), slot_rows, rank_rows, words.data()}.run();
}

int64_t ReplicaSlots::level(int64_t* slot_rows, const uint8_t* left_out) const {
  std::vector<int64_t> rank_rows(static_cast<size_t>(num_ranks()));
  add_by_rank(slot_rows, rank_rows.data());
  for (size_t rank_idx = 0; rank_idx < rank_rows.size() && left_out != nullptr; ++rank_idx)
    if (left_out[rank_idx] != 0)
      rank_rows[rank_idx] = -1;
  return level(slot_rows, rank_rows.data());
}

}  // namespace moe::layout
