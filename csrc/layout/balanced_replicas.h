#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace moe::layout {

/// Slots by expert and by rank, as RankLeveling reads them. Slots are numbered over all ranks.
struct ReplicaTable {
  int num_ranks = 0;
  const int32_t* slot_rank = nullptr;     ///< [num_slots]
  const int32_t* slot_expert = nullptr;   ///< [num_slots], -1 for an empty one
  const int32_t* expert_begin = nullptr;  ///< [num_experts + 1], into expert_slots
  const int32_t* expert_slots = nullptr;  ///< slots of every expert, ascending
  const int32_t* rank_begin = nullptr;    ///< [num_ranks + 1], into shared_slots
  const int32_t* shared_slots = nullptr;  ///< slots of replicated experts on every rank, ascending
};

/// Accesses of a thread of the host to what it works on; kernels have their own.
struct HostMemory {
  template <typename T>
  MOE_HOST_DEVICE static T load(const T* from) {
    return *from;
  }
  template <typename T>
  MOE_HOST_DEVICE static void store(T* to, T value) {
    *to = value;
  }
};

/// Moves rows between slots of the same expert until the largest number of rows of any rank is as
/// small as the slots allow, exactly.
///
/// Two ranks are neighbors if they have slots of the same expert. The limit is at first the mean,
/// rounded up. In ascending order, each rank above the limit passes its excess along neighbors to
/// the nearest rank below the limit (breadth first, in the order of slots); ranks in between keep
/// their number of rows. If every rank that it reaches is full, the limit becomes the mean of these
/// ranks, rounded up. A rank that is left out has no rows, gets none, and counts in no mean. Runs
/// on one thread. replica_spec.balance() of moe_comm/ep is the definition.
///
/// Example: 3 ranks with slots of experts [0], [0, 1] and [1], 9 rows of expert 0 and 3 of expert
/// 1, at first [9, 0, 3, 0]. The limit is 4: rank 0 hands 1 row to rank 1, and 3 more while rank 1
/// hands its 3 of expert 1 to rank 2. What ranks 0 and 1 have then cannot go there: the limit
/// becomes 5, and the result is [5, 4, 0, 3].
template <typename Memory>
struct RankLeveling {
  /// Size of `words`, the scratch memory.
  MOE_HOST_DEVICE static constexpr int64_t num_words(int num_ranks) {
    return int64_t{4} * num_ranks;
  }

  ReplicaTable table;
  int64_t* slot_rows;  ///< [num_slots], any split of every expert's rows
  int64_t* rank_rows;  ///< [num_ranks], their sums by rank; -1: left out
  int32_t* words;      ///< [num_words(num_ranks)], of any values
  int64_t limit = 0;

  /// @return the largest number of rows of any rank.
  MOE_HOST_DEVICE int64_t run() {
    int num_present = 0;
    MOE_ROLLED
    for (int rank_idx = 0; rank_idx < table.num_ranks; ++rank_idx) {
      const int64_t num_rows = rows_of(rank_idx);
      const bool is_present = num_rows >= 0;
      limit += is_present ? num_rows : 0;
      num_present += is_present;
      Memory::store(last_search() + rank_idx, is_present ? int32_t{-1} : INT32_MAX);
    }
    limit = num_present == 0 ? 0 : mean(limit, num_present);
    int32_t search = 0;
    int64_t most = 0;
    MOE_ROLLED
    for (int rank_idx = 0; rank_idx < table.num_ranks; ++rank_idx) {
      MOE_ROLLED
      while (rows_of(rank_idx) > limit)
        hand_on(rank_idx, search++);
    }
    MOE_ROLLED
    for (int rank_idx = 0; rank_idx < table.num_ranks; ++rank_idx) {
      const int64_t num_rows = rows_of(rank_idx);
      most = num_rows > most ? num_rows : most;
    }
    return most;
  }

 private:
  MOE_HOST_DEVICE int32_t* queue() const { return words; }
  /// Search that found a rank last; of one that is left out, the greatest number.
  MOE_HOST_DEVICE int32_t* last_search() const { return words + table.num_ranks; }
  /// The slot whose rows come to a rank, and the one of the same expert that they come to.
  MOE_HOST_DEVICE int32_t* giver() const { return words + 2 * table.num_ranks; }
  MOE_HOST_DEVICE int32_t* taker() const { return words + 3 * table.num_ranks; }
  MOE_HOST_DEVICE int64_t rows_of(int rank_idx) const { return Memory::load(rank_rows + rank_idx); }
  MOE_HOST_DEVICE void add(int64_t* rows, int64_t more) const {
    Memory::store(rows, Memory::load(rows) + more);
  }
  /// The rank whose rows come to @p rank_idx.
  MOE_HOST_DEVICE int giving_rank(int rank_idx) const {
    return Memory::load(table.slot_rank + Memory::load(giver() + rank_idx));
  }
  MOE_HOST_DEVICE static int64_t mean(int64_t num_rows, int num_ranks) {
    return (num_rows + num_ranks - 1) / num_ranks;
  }

  /// Breadth first from @p root, as long as what was found on the way still holds. Raises the limit
  /// where all that were found are full: what moved on the way moved between slots of one expert,
  /// of which every one has been found.
  MOE_HOST_DEVICE void hand_on(int root, int32_t search) {
    int num_found = 1;
    Memory::store(queue(), int32_t{root});
    Memory::store(last_search() + root, search);
    Memory::store(taker() + root, int32_t{-1});
    MOE_ROLLED
    for (int at = 0; at < num_found; ++at) {
      const int32_t* const of_rank = table.rank_begin + Memory::load(queue() + at);
      const int32_t end_of_rank = Memory::load(of_rank + 1);
      // All ranks of the expert that led here were found with this one.
      const int32_t found_by = Memory::load(taker() + Memory::load(queue() + at));
      MOE_ROLLED
      for (int i = Memory::load(of_rank); i < end_of_rank; ++i) {
        const int32_t slot = Memory::load(table.shared_slots + i);
        if (slot == found_by || Memory::load(slot_rows + slot) <= 0)
          continue;
        const int32_t* const of_expert =
            table.expert_begin + Memory::load(table.slot_expert + slot);
        const int32_t end_of_expert = Memory::load(of_expert + 1);
        MOE_ROLLED
        for (int j = Memory::load(of_expert); j < end_of_expert; ++j) {
          const int32_t other = Memory::load(table.expert_slots + j);
          const int32_t rank_idx = Memory::load(table.slot_rank + other);
          if (Memory::load(last_search() + rank_idx) >= search)
            continue;
          Memory::store(last_search() + rank_idx, search);
          Memory::store(giver() + rank_idx, slot);
          Memory::store(taker() + rank_idx, other);
          Memory::store(queue() + num_found++, rank_idx);
          if (rows_of(rank_idx) < limit && !move(root, rank_idx))
            return;
        }
      }
    }
    int64_t num_rows = 0;
    MOE_ROLLED
    for (int at = 0; at < num_found; ++at)
      num_rows += rows_of(Memory::load(queue() + at));
    limit = mean(num_rows, num_found);
  }

  /// Hands rows on from @p root to the rank that was just found.
  /// @return whether @p root has more, and every rank on the way has something left to hand on.
  MOE_HOST_DEVICE bool move(int root, int found) {
    int64_t num_rows = rows_of(root) - limit;
    const int64_t room = limit - rows_of(found);
    if (num_rows > room)
      num_rows = room;
    MOE_ROLLED
    for (int on = found; on != root; on = giving_rank(on)) {
      const int64_t given = Memory::load(slot_rows + Memory::load(giver() + on));
      num_rows = num_rows > given ? given : num_rows;
    }
    add(rank_rows + root, -num_rows);
    add(rank_rows + found, num_rows);
    bool goes_on = rows_of(root) > limit;
    MOE_ROLLED
    for (int on = found; on != root; on = giving_rank(on)) {
      add(slot_rows + Memory::load(giver() + on), -num_rows);
      add(slot_rows + Memory::load(taker() + on), num_rows);
    }
    MOE_ROLLED
    for (int on = found; on != root; on = giving_rank(on))
      goes_on = goes_on && Memory::load(slot_rows + Memory::load(giver() + on)) > 0;
    return goes_on;
  }
};

}  // namespace moe::layout
