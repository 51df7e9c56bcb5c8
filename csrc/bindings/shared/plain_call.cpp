#include "bindings/shared/plain_call.h"

#include <utility>

#include "bindings/shared/make_tensor.h"
#include "layout/routing_map.h"
#include "ops/dispatch.h"

namespace moe::bindings {

namespace {

constexpr int64_t kAnyNumber = 0;
constexpr int32_t kBool = 6 << 8 | 8;  // DLPack's type

/// A tensor of two dimensions as the operations take it, in memory of the endpoint.
std::optional<TensorView> view_matrix(const ops::EndpointBase& endpoint,
                                      py::handle tensor,
                                      int64_t num_columns,
                                      DlpackTensor* found) {
  if (!describe_tensor(tensor, found) || found->num_dims != 2 || found->type_lanes != 1 ||
      found->device_type != endpoint.dlpack_device_type() ||
      found->device_id != endpoint.device_idx())
    return std::nullopt;
  const int64_t columns = found->shape[1];
  const bool is_in_order = (found->strides[1] == 1 || columns == 1) &&
                           (found->strides[0] == columns || found->shape[0] <= 1);
  if (!is_in_order || columns < 1 || (num_columns != kAnyNumber && columns != num_columns) ||
      is_negated(tensor))
    return std::nullopt;
  const TensorView view = view_of(*found);
  if (problem_with_memory(tensor, view.data, view.bytes(), view.element_bytes))
    return std::nullopt;
  return view;
}

/// Of one type, one row for each token.
std::optional<TensorView> view_per_token(const ops::EndpointBase& endpoint,
                                         py::handle tensor,
                                         int32_t type,
                                         int64_t num_tokens,
                                         int64_t num_columns) {
  DlpackTensor found;
  const auto view = view_matrix(endpoint, tensor, num_columns, &found);
  if (!view || found.type() != type || view->num_rows != num_tokens)
    return std::nullopt;
  return view;
}

std::optional<TensorView> view_weights(const ops::EndpointBase& endpoint,
                                       py::handle weights,
                                       int64_t num_tokens,
                                       int64_t num_topk) {
  if (weights.is_none())
    return TensorView{};
  return view_per_token(endpoint, weights, dlpack_type(DType::kFloat32), num_tokens, num_topk);
}

/// The choices and weights of @p plain, whose rows are known.
bool view_listed(const ops::EndpointBase& endpoint,
                 py::handle routing_map,
                 py::handle probs,
                 PlainDispatch* plain) {
  // Kernels read choices where they lie, and a map on a device is listed there.
  if (endpoint.dlpack_device_type() != DlpackDevice{}.type || !endpoint.is_host_caller())
    return false;
  const int64_t num_tokens = plain->rows.num_rows;
  const int64_t num_experts = endpoint.config().num_experts;
  const auto map = view_per_token(endpoint, routing_map, kBool, num_tokens, num_experts);
  const auto dense = view_weights(endpoint, probs, num_tokens, num_experts);
  if (!map || !dense)
    return false;
  auto listed = std::make_shared<ListedChoices>(list_choices(*map, *dense));
  plain->choices = {reinterpret_cast<std::byte*>(listed->topk_idx.data()),
                    num_tokens,
                    listed->num_topk,
                    sizeof(int64_t)};
  if (dense->element_bytes > 0)
    plain->weights = {
        listed->weights.data(), num_tokens, plain->choices.row_elements, dense->element_bytes};
  plain->listed = std::move(listed);
  return true;
}

bool share_bytes(const TensorView& one, const TensorView& other) {
  return one.data < other.data + other.bytes() && other.data < one.data + one.bytes();
}

std::optional<DType> summable(int32_t type) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64})
    if (dlpack_type(dtype) == type)
      return dtype;
  return std::nullopt;
}

/// Rows that the configuration allows.
/// @param type  Written: that of an element.
std::optional<TensorView> view_rows(const ops::EndpointBase& endpoint,
                                    py::handle rows,
                                    int32_t* type) {
  const ops::EndpointConfig& config = endpoint.config();
  DlpackTensor found;
  const auto view = view_matrix(endpoint, rows, config.hidden, &found);
  if (!view || view->row_bytes() % ops::kRowUnit != 0)
    return std::nullopt;
  *type = found.type();
  const bool is_known =
      config.row_type == 0 ? summable(*type).has_value() : *type == config.row_type;
  if (!is_known)
    return std::nullopt;
  return view;
}

}  // namespace

ListedChoices list_choices(const TensorView& map, const TensorView& probs) {
  const layout::RoutingMap chosen{
      reinterpret_cast<const uint8_t*>(map.data), map.num_rows, map.row_elements};
  ListedChoices listed;
  listed.num_topk = chosen.num_topk();
  listed.topk_idx.resize(static_cast<size_t>(chosen.num_tokens * listed.num_topk));
  chosen.list(listed.num_topk, listed.topk_idx.data());
  if (probs.element_bytes == 0)
    return listed;
  listed.weights.resize(listed.topk_idx.size() * static_cast<size_t>(probs.element_bytes));
  layout::gather_choices(listed.topk_idx.data(),
                         chosen.num_tokens,
                         listed.num_topk,
                         probs.data,
                         chosen.num_experts,
                         probs.element_bytes,
                         listed.weights.data());
  return listed;
}

std::optional<PlainDispatch> view_plain_dispatch(const ops::EndpointBase& endpoint,
                                                 py::handle x,
                                                 py::handle topk_idx,
                                                 py::handle topk_weights,
                                                 layout::RowLayout layout,
                                                 int64_t expert_alignment,
                                                 bool is_map) {
  const ops::EndpointConfig& config = endpoint.config();
  PlainDispatch plain;
  const auto rows = view_rows(endpoint, x, &plain.row_type);
  if (!rows)
    return std::nullopt;
  const int64_t num_tokens = rows->num_rows;
  const bool is_low_latency = layout == layout::RowLayout::kLowLatency;
  if (config.num_max_tokens == 0 ? is_low_latency : num_tokens > config.num_max_tokens)
    return std::nullopt;
  if (is_low_latency && expert_alignment != 1)
    return std::nullopt;
  plain.rows = *rows;
  if (is_map) {
    if (!view_listed(endpoint, topk_idx, topk_weights, &plain) ||
        (config.num_max_topk != 0 && plain.choices.row_elements != config.num_max_topk))
      return std::nullopt;
    return plain;
  }
  const auto choices = view_per_token(endpoint, topk_idx, kInt64, num_tokens, config.num_max_topk);
  if (!choices)
    return std::nullopt;
  const auto weights = view_weights(endpoint, topk_weights, num_tokens, choices->row_elements);
  if (!weights)
    return std::nullopt;
  plain.choices = *choices;
  plain.weights = *weights;
  return plain;
}

std::optional<PlainCombine> view_plain_combine(const ops::EndpointBase& endpoint,
                                               const ops::PlanHeader& plan,
                                               py::handle expert_out,
                                               py::handle topk_weights,
                                               py::handle out) {
  int32_t type = 0;
  const auto rows = view_rows(endpoint, expert_out, &type);
  if (!rows || rows->num_rows != plan.num_rows())
    return std::nullopt;
  const std::optional<DType> dtype = summable(type);
  const auto weights = view_weights(endpoint, topk_weights, plan.num_tokens, plan.num_topk);
  if (!dtype || !weights || (plan.arrangement.is_by_rank() && !topk_weights.is_none()))
    return std::nullopt;
  PlainCombine plain{*dtype, *rows, *weights, {}};
  if (!out.is_none()) {
    const auto sums = view_per_token(endpoint, out, type, plan.num_tokens, rows->row_elements);
    if (!sums || share_bytes(*sums, plain.rows) || share_bytes(*sums, plain.weights))
      return std::nullopt;
    plain.out = *sums;
  }
  return plain;
}

}  // namespace moe::bindings
