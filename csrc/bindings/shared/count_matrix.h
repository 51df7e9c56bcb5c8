#pragma once

#include <pybind11/pybind11.h>

#include "bindings/shared/tensor_view.h"
#include "layout/routing.h"

namespace moe::bindings {

/// A copy of a count matrix in host memory.
/// @param counts  int32 `[num_ranks, num_experts + num_ranks + 2]`
/// @throws InvalidArgument  it has another shape or type.
layout::CountMatrix count_matrix_of(pybind11::handle counts, int num_ranks, int num_experts);

/// @param choices  int64 `[num_tokens, num_topk]`, of @p rank_idx
/// @throws InvalidArgument  @p counts cannot be what was kept of them.
void check_plan(const layout::CountMatrix& counts,
                const TensorView& choices,
                const layout::Placement& placement,
                bool is_by_rank,
                int rank_idx);

}  // namespace moe::bindings
