#pragma once

#include <cstdint>
#include <vector>

#include "layout/rank_leveling.h"
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
  int num_local_ranks = 1;  ///< of a node, consecutive ones
  ReplicaSlots slots;

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

/// Counts as count_choices() of layout/routing.h where @p replicas is null. Else counts of logical
/// experts, in the first columns, and at every rank how many tokens may be bound for it at most.
/// @return the flat index of the first id outside [-1, num_ids()), or -1.
int64_t count_choices(const int64_t* topk_idx,
                      int64_t num_tokens,
                      int64_t num_topk,
                      const Replicas* replicas,
                      const Placement& placement,
                      int32_t* counts);

/// Turns counts of logical experts into counts of slots. Where tokens bound for a rank were, there
/// are rows then, but for the marks of masks; see count_tokens().
void share_rows(const Replicas& replicas, const Placement& placement, CountMatrix* counts);

/// The slots of one rank's choices, in order of tokens.
/// @param counts  What share_rows() made of this rank's counts.
std::vector<int64_t> choose_slots(const int64_t* topk_idx,
                                  int64_t num_choices,
                                  const Replicas& replicas,
                                  const int32_t* counts);

/// Says in one rank's counts how many of its tokens are bound for every rank, where a token has one
/// row a rank. Choices may be anything.
/// @param counts  What share_rows() made of this rank's counts; those of ranks are overwritten.
/// @return whether the choices are those that were counted.
bool count_tokens(const int64_t* topk_idx,
                  int64_t num_tokens,
                  int64_t num_topk,
                  const Replicas& replicas,
                  const Placement& placement,
                  int32_t* counts);

}  // namespace moe::layout
