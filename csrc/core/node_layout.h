#pragma once

#include "core/host_device.h"

namespace moe {

/// Ranks of each node: consecutive ones, equally many on every node.
///
/// Example: 6 ranks, 2 a node: rank 3 is local rank 1 of node 1; its rail is ranks 1, 3 and 5.
struct NodeLayout {
  int num_ranks = 1;
  int num_local_ranks = 1;

  MOE_HOST_DEVICE int num_nodes() const { return num_ranks / num_local_ranks; }
  MOE_HOST_DEVICE int node_idx(int rank_idx) const { return rank_idx / num_local_ranks; }
  MOE_HOST_DEVICE int local_rank_idx(int rank_idx) const { return rank_idx % num_local_ranks; }
  MOE_HOST_DEVICE int rank_of(int node_idx, int local_rank_idx) const {
    return node_idx * num_local_ranks + local_rank_idx;
  }
  MOE_HOST_DEVICE bool is_same_node(int rank_idx, int other_rank) const {
    return node_idx(rank_idx) == node_idx(other_rank);
  }
  /// The rank of @p node_idx through which @p rank_idx reaches that node.
  MOE_HOST_DEVICE int rail_rank(int rank_idx, int node_idx) const {
    return rank_of(node_idx, local_rank_idx(rank_idx));
  }
};

}  // namespace moe
