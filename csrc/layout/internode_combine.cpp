#include "layout/internode_combine.h"

namespace moe::layout {

int64_t num_rows_on_node(const CountMatrix& counts,
                         const Placement& placement,
                         const Arrangement& arrangement,
                         const NodeLayout& nodes,
                         int src_rank,
                         int node_idx) {
  int64_t num_rows = 0;
  for (int i = 0; i < nodes.num_local_ranks; ++i) {
    const int rank_idx = nodes.rank_of(node_idx, i);
    if (arrangement.is_by_rank())
      num_rows += counts.to_rank(src_rank, rank_idx);
    else
      for (const int32_t expert_idx : placement.local_experts[static_cast<size_t>(rank_idx)])
        num_rows += counts.to_expert(src_rank, expert_idx);
  }
  return num_rows;
}

}  // namespace moe::layout
