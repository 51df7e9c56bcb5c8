#include "bindings/shared/count_matrix.h"

#include <algorithm>

#include "core/error.h"

namespace moe::bindings {

layout::CountMatrix count_matrix_of(pybind11::handle counts, int num_ranks, int num_experts) {
  const TensorView matrix = view_tensor(counts);
  layout::CountMatrix copied(num_ranks, num_experts);
  MOE_CHECK(matrix.num_rows == copied.num_ranks && matrix.row_elements == copied.stride() &&
                matrix.element_bytes == 4,
            "counts must be int32 [",
            copied.num_ranks,
            ", ",
            copied.stride(),
            "], got [",
            matrix.num_rows,
            ", ",
            matrix.row_elements,
            "]");
  std::copy_n(
      reinterpret_cast<const int32_t*>(matrix.data), copied.counts.size(), copied.counts.data());
  return copied;
}

void check_plan(const layout::CountMatrix& counts,
                const TensorView& choices,
                const layout::Placement& placement,
                bool is_by_rank,
                int rank_idx) {
  MOE_CHECK(layout::may_keep(counts,
                             reinterpret_cast<const int64_t*>(choices.data),
                             choices.num_rows,
                             choices.row_elements,
                             placement,
                             is_by_rank,
                             rank_idx),
            "topk_idx and counts of a handle belong to different dispatches");
}

}  // namespace moe::bindings
