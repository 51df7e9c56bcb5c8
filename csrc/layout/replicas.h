#pragma once

#include <cstdint>
#include <vector>

#include "layout/replica_slots.h"
#include "layout/routing.h"

namespace moe::layout {

/// Logical experts that lie in slots, several of one expert on several ranks. To all else of an
/// operation slots are experts, so a Placement and a CountMatrix beside it are of slots; here the
/// choices and counts of logical experts become those. The rule is "balanced" of
/// moe_comm/ep/replica_spec.py, equal on every rank.
///
/// Example: 2 ranks have expert 0 in slots 0 and 1. Rank 0 chooses it 5 times, rank 1 never: slots
/// 0 and 1 get 3 and 2 rows, rank 0's first three choices and the others.
struct Replicas {
  int num_local_ranks = 1;  ///< ranks of a node, consecutive ones
  ReplicaSlots slots;
  std::vector<int32_t> shared_experts;  ///< experts with several slots, ascending
  std::vector<int32_t> set_of_expert;   ///< [num_experts], see TokenSetMap

  /// @param slot_expert  [slots], -1 for an empty one; every expert has a slot.
  Replicas(const std::vector<int32_t>& slot_expert,
           int num_experts,
           int num_local_ranks,
           const Placement& placement);

  int num_experts() const { return slots.num_experts(); }
};

/// Number of ids that choices are among.
inline int num_ids(const Replicas* replicas, const Placement& placement) {
  return replicas == nullptr ? placement.num_experts : replicas->num_experts();
}

/// Turns counts of logical experts into counts of slots. Where tokens bound for a rank were, there
/// are rows then, but for the marks of masks; see count_tokens().
void share_rows(const Replicas& replicas, const Placement& placement, CountMatrix* counts);

/// The slots of one rank's choices, in order of tokens.
/// @param counts  Counts of this rank as share_rows() has made them.
std::vector<int64_t> choose_slots(const int64_t* topk_idx,
                                  int64_t num_choices,
                                  const Replicas& replicas,
                                  const int32_t* counts);

}  // namespace moe::layout
