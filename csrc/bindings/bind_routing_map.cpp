#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
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
  const TensorView chosen = view_tensor(routing_map);
  const TensorView dense = view_tensor(probs);
  const layout::RoutingMap map{
      reinterpret_cast<const uint8_t*>(chosen.data), chosen.num_rows, chosen.row_elements};
  const int64_t num_topk = map.num_topk();
  std::vector<int64_t> topk_idx(static_cast<size_t>(map.num_tokens * num_topk));
  map.list(num_topk, topk_idx.data());
  py::object values = py::none();
  if (!probs.is_none()) {
    std::vector<std::byte> chosen_probs(topk_idx.size() * static_cast<size_t>(dense.element_bytes));
    layout::gather_choices(topk_idx.data(),
                           map.num_tokens,
                           num_topk,
                           dense.data,
                           map.num_experts,
                           dense.element_bytes,
                           chosen_probs.data());
    values = vector_tensor(std::move(chosen_probs), {map.num_tokens, num_topk}, probs_type);
  }
  return py::make_tuple(vector_tensor(std::move(topk_idx), {map.num_tokens, num_topk}, kInt64),
                        std::move(values));
}

/// @param values  Null for ones of a byte each.
py::object dense_of_topk(py::handle values,
                         py::handle topk_idx,
                         int64_t num_experts,
                         int32_t type) {
  const TensorView choices = view_tensor(topk_idx);
  const TensorView given = view_tensor(values);
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
