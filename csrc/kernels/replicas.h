#pragma once

#include <cstddef>
#include <cstdint>

#include "core/symmetric_memory.h"
#include "layout/balanced_replicas.h"
#include "layout/workspace.h"

namespace moe::kernels {

/// Device memory by which a dispatch of logical experts gives their rows to replicas; of one
/// placement, used by one dispatch after the other.
struct Replicas {
  layout::ReplicaTable table;
  int32_t num_experts = 0;  ///< logical ones, at most as many as slots; 0: ids of choices are slots
  int32_t num_local_ranks = 1;
  int32_t* logical = nullptr;  ///< [num_ranks, num_experts], for sharing
  /// [num_slots]: this rank's rows for the same expert that lower slots get, by the exchange.
  int32_t* run_begins = nullptr;

  // By rank, see kernels/token_sets.h.
  const int32_t* set_of_expert = nullptr;   ///< [num_experts], see layout::TokenSetMap
  const int32_t* shared_experts = nullptr;  ///< [num_shared]: those with several slots, ascending
  int32_t num_shared = 0;
  /// [num_ranks, num_slots, 2]: first and last token of the rank whose choice a slot gets.
  int32_t* run_tokens = nullptr;
  uint64_t* set_places = nullptr;  ///< [num_ranks]: addresses of their sets, 0 without tokens
  int32_t* set_words = nullptr;    ///< [num_ranks]: words of 32 bits of each
};

/// Places in the heap of one rank for sets of tokens (layout::TokenSetMap), its own and, across
/// nodes, those of its rail, which it hands on to its node. They are used in turn: in one more than
/// a ring has entries, as sets are written before that of their epoch is known to be free.
struct TokenSets {
  std::byte* base = nullptr;  ///< null for none: only rows by rank of replicas are counted so
  Offer offer;                ///< offer of all places
  int64_t stride = 0;         ///< bytes of one
  int32_t num_nodes = 1;
  /// device [num_ranks, words of a set of 32 bits]: this rank's tokens that are bound for every
  /// rank, and how many of them lie in lower words. By the exchange.
  uint32_t* bound_tokens = nullptr;
  int32_t* bound_before = nullptr;

  MOE_HOST_DEVICE static int64_t num_places(int depth, int num_nodes) {
    return (int64_t{depth} + 1) * num_nodes;
  }
  MOE_HOST_DEVICE int64_t offset(uint64_t epoch, int depth, int node_idx) const {
    return (layout::Workspace::entry_idx(epoch, depth + 1) * num_nodes + node_idx) * stride;
  }
  MOE_HOST_DEVICE Offer offer_at(uint64_t epoch, int depth, int node_idx, uint64_t bytes) const {
    Offer at = offer;
    at.offset += static_cast<uint64_t>(offset(epoch, depth, node_idx));
    at.bytes = bytes;
    return at;
  }
};

}  // namespace moe::kernels
