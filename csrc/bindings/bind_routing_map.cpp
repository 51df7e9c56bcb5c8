#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/call_tensors.h"
#include "bindings/shared/make_tensor.h"
#include "bindings/shared/submitted.h"
#include "bindings/shared/tensor_view.h"
#include "core/error.h"
#include "layout/routing_map.h"

// Routing maps to lists of choices and back, each in one call: as a dozen operators of torch this
// takes longer than a small exchange.

namespace moe::bindings {

namespace {

py::tuple topk_of_routing_map(py::handle routing_map, py::handle probs, int32_t probs_type) {
  const TensorView map = view_tensor(routing_map, "routing_map");
  ListedChoices listed = list_choices(map, view_tensor(probs, "probs"));
  py::object values = py::none();
  if (!probs.is_none())
    values = vector_tensor(std::move(listed.weights), {map.num_rows, listed.num_topk}, probs_type);
  return py::make_tuple(
      vector_tensor(std::move(listed.topk_idx), {map.num_rows, listed.num_topk}, kInt64),
      std::move(values));
}

/// @param values  Null for ones of a byte each.
py::object dense_of_topk(py::handle values,
                         py::handle topk_idx,
                         int64_t num_experts,
                         int32_t type) {
  const TensorView choices = view_tensor(topk_idx, "topk_idx");
  const TensorView given = view_tensor(values, "the values of choices");
  const int64_t value_bytes = values.is_none() ? 1 : given.element_bytes;
  std::vector<std::byte> ones;
  if (values.is_none())
    ones.assign(static_cast<size_t>(choices.num_rows * choices.row_elements), std::byte{1});
  const auto* const ids = reinterpret_cast<const int64_t*>(choices.data);
  std::vector<std::byte> dense(static_cast<size_t>(choices.num_rows * num_experts * value_bytes));
  const int64_t bad_idx = layout::scatter_choices(ids,
                                                  choices.num_rows,
                                                  choices.row_elements,
                                                  values.is_none() ? ones.data() : given.data,
                                                  num_experts,
                                                  value_bytes,
                                                  dense.data());
  if (bad_idx >= 0)
    throw InvalidArgument(concat(
        "topk_idx must be below ", num_experts, ", the number of experts, got ", ids[bad_idx]));
  return vector_tensor(std::move(dense), {choices.num_rows, num_experts}, type);
}

}  // namespace

void bind_routing_map(py::module_& module) {
  module.def("topk_of_routing_map", &topk_of_routing_map);
  module.def("dense_of_topk", &dense_of_topk);
}

}  // namespace moe::bindings
