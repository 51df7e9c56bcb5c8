#include "layout/internode_combine.h"

namespace moe::layout {

int64_t num_rows_on_node(const CountMatrix& counts,
                         const Placement& placement,
                         const Arrangement& arrangement,
                         const NodeLayout& nodes,
                         int src_rank,
                         int node_idx) {
  int64_t num_rows = 0;
  for (int i = 0; i < nodes.num_local_ranks; ++i)
    num_rows +=
        num_rows_between(counts, placement, arrangement, src_rank, nodes.rank_of(node_idx, i));
  return num_rows;
}

}  // namespace moe::layout
