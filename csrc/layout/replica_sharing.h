#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "layout/balanced_replicas.h"
#include "layout/routing.h"

namespace moe::layout {

/// A count matrix on its way from logical experts to slots, one expert after another or several at
/// a time: what is said of one touches nothing of another. In this order: place_at_home() of every
/// expert and rank, RankLeveling, share() of every expert. share_rows() of layout/replicas.h does
/// it on the host.
template <typename Memory>
struct ReplicaSharing {
  ReplicaTable table;
  int32_t num_experts;
  int32_t num_slots;
  int32_t num_local_ranks;   ///< ranks of a node, consecutive ones
  const uint8_t* is_masked;  ///< [num_ranks]
  int64_t* slot_rows;        ///< [num_slots], zero
  /// [num_ranks, num_experts]: the choices of every rank; used up.
  int32_t* logical;
  /// [num_ranks, Row::num_counts]: those of slots are zero, and then what the slot gets of the
  /// rank.
  int32_t* counts;

  MOE_HOST_DEVICE int32_t* counts_of(int src_rank) const {
    return counts + int64_t{src_rank} * Row::num_counts(table.num_ranks, num_slots);
  }

  /// Returns whether any rank masks @p rank_idx, by the counts.
  MOE_HOST_DEVICE bool finds_mask(int rank_idx) const {
    bool is_found = false;
    MOE_ROLLED
    for (int src_rank = 0; src_rank < table.num_ranks; ++src_rank)
      is_found = is_found || Memory::load(counts_of(src_rank) + num_slots + rank_idx) ==
                                 int32_t{CountMatrix::kMasked};
    return is_found;
  }

  /// Rows of a rank that is not masked: to the slot on that rank, else the lowest on its node, else
  /// the lowest; to none where all are masked.
  MOE_HOST_DEVICE void place_at_home(int src_rank, int expert_idx) const {
    const int32_t num_rows = Memory::load(choices_of(src_rank, expert_idx));
    const int32_t slot = num_rows == 0 ? -1 : home(src_rank, expert_idx);
    if (slot >= 0)
      Memory::store(slot_rows + slot, Memory::load(slot_rows + slot) + num_rows);
  }

  /// Gives slots rows: first those of their own rank, then of their node, then
  /// from all, in order of ranks, and of slots for each. What is over, as it belongs to a rank that
  /// is masked or has nowhere to go, to the first.
  MOE_HOST_DEVICE void share(int expert_idx) const {
    const int32_t first = Memory::load(table.expert_begin + expert_idx);
    if (Memory::load(table.expert_begin + expert_idx + 1) - first > 1) {
      MOE_ROLLED
      for (int round = 0; round < 3; ++round)
        share_near(expert_idx, round == 0 ? 1 : round == 1 ? num_local_ranks : table.num_ranks);
    }
    const int32_t slot = Memory::load(table.expert_slots + first);
    MOE_ROLLED
    for (int src_rank = 0; src_rank < table.num_ranks; ++src_rank) {
      int32_t* const count = counts_of(src_rank) + slot;
      Memory::store(count, Memory::load(count) + Memory::load(choices_of(src_rank, expert_idx)));
    }
  }

 private:
  MOE_HOST_DEVICE int32_t* choices_of(int src_rank, int expert_idx) const {
    return logical + int64_t{src_rank} * num_experts + expert_idx;
  }
  MOE_HOST_DEVICE int owner(int32_t slot) const { return Memory::load(table.slot_rank + slot); }
  MOE_HOST_DEVICE bool masks(int rank_idx) const { return Memory::load(is_masked + rank_idx) != 0; }

  MOE_HOST_DEVICE int32_t home(int src_rank, int expert_idx) const {
    int32_t on_node = -1;
    int32_t lowest = -1;
    const int32_t end = Memory::load(table.expert_begin + expert_idx + 1);
    MOE_ROLLED
    for (int i = Memory::load(table.expert_begin + expert_idx); i < end; ++i) {
      const int32_t slot = Memory::load(table.expert_slots + i);
      const int rank_idx = owner(slot);
      if (masks(rank_idx))
        continue;
      if (rank_idx == src_rank)
        return slot;
      if (lowest < 0)
        lowest = slot;
      if (on_node < 0 && rank_idx / num_local_ranks == src_rank / num_local_ranks)
        on_node = slot;
    }
    return on_node >= 0 ? on_node : lowest;
  }

  /// Shares rows of ranks that are no further than @p distance consecutive ranks reach.
  MOE_HOST_DEVICE void share_near(int expert_idx, int distance) const {
    const int32_t end = Memory::load(table.expert_begin + expert_idx + 1);
    MOE_ROLLED
    for (int src_rank = 0; src_rank < table.num_ranks; ++src_rank) {
      int32_t* const choices = choices_of(src_rank, expert_idx);
      int32_t left = masks(src_rank) ? 0 : Memory::load(choices);
      MOE_ROLLED
      for (int i = Memory::load(table.expert_begin + expert_idx); i < end && left > 0; ++i) {
        const int32_t slot = Memory::load(table.expert_slots + i);
        const int64_t num_rows = Memory::load(slot_rows + slot);
        if (num_rows == 0 || src_rank / distance != owner(slot) / distance)
          continue;
        const auto amount = static_cast<int32_t>(num_rows < left ? num_rows : left);
        int32_t* const count = counts_of(src_rank) + slot;
        Memory::store(count, Memory::load(count) + amount);
        Memory::store(slot_rows + slot, num_rows - amount);
        left -= amount;
        Memory::store(choices, Memory::load(choices) - amount);
      }
    }
  }
};

}  // namespace moe::layout
