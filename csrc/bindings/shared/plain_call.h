#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

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

/// A routing map as the list that dispatch takes, with the weights of its choices.
struct ListedChoices {
  int64_t num_topk = 1;            ///< the most of a token
  std::vector<int64_t> topk_idx;   ///< [num_tokens, num_topk], ascending, then -1
  std::vector<std::byte> weights;  ///< likewise, 0 at a -1; empty for none
};

/// @param map    bool `[num_tokens, num_experts]`
/// @param probs  Likewise, of any type; empty for none
ListedChoices list_choices(const TensorView& map, const TensorView& probs);

/// The tensors of a plain dispatch.
struct PlainDispatch {
  int32_t row_type = 0;  ///< DLPack's
  TensorView rows;
  TensorView choices;
  TensorView weights;
  std::shared_ptr<const ListedChoices> listed;  ///< what choices and weights lie in; may be null
};

/// Nothing where the glance does not suffice.
/// @param is_map  @p topk_idx is a routing map, @p topk_weights has a number for each of its
/// places.
std::optional<PlainDispatch> view_plain_dispatch(const ops::EndpointBase& endpoint,
                                                 py::handle x,
                                                 py::handle topk_idx,
                                                 py::handle topk_weights,
                                                 layout::RowLayout layout,
                                                 int64_t expert_alignment,
                                                 bool is_map);

/// The tensors of a plain combine.
struct PlainCombine {
  DType dtype;
  TensorView rows;
  TensorView weights;
  TensorView out;  ///< empty for none
};

std::optional<PlainCombine> view_plain_combine(const ops::EndpointBase& endpoint,
                                               const ops::PlanHeader& plan,
                                               py::handle expert_out,
                                               py::handle topk_weights,
                                               py::handle out);

}  // namespace moe::bindings
