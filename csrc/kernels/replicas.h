#pragma once

#include <cstdint>

#include "layout/rank_leveling.h"

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
};

}  // namespace moe::kernels
