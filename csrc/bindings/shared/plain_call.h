#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "bindings/shared/tensor_view.h"
#include "core/dtype.h"
#include "layout/row.h"
#include "ops/endpoint_base.h"
#include "ops/plan.h"

// Calls whose tensors are seen at a glance to pass every check of moe_comm/ep/validation.py: a
// decode step takes longer to check one by one than its rows take to travel. What is not plain may
// still be right: the checks decide, and word what is wrong.

namespace moe::bindings {

namespace py = pybind11;

/// The tensors of a plain dispatch.
struct PlainDispatch {
  int32_t row_type = 0;  ///< DLPack's
  TensorView rows;
  TensorView choices;
  TensorView weights;
};

/// Nothing where the glance does not suffice.
std::optional<PlainDispatch> view_plain_dispatch(const host::EndpointBase& endpoint,
                                                 py::handle x,
                                                 py::handle topk_idx,
                                                 py::handle topk_weights,
                                                 layout::RowLayout layout,
                                                 int64_t expert_alignment);

/// The tensors of a plain combine.
struct PlainCombine {
  DType dtype;
  TensorView rows;
  TensorView weights;
};

std::optional<PlainCombine> view_plain_combine(const host::EndpointBase& endpoint,
                                               const host::PlanHeader& plan,
                                               py::handle expert_out,
                                               py::handle topk_weights);

}  // namespace moe::bindings
