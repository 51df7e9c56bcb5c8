#include "bindings/shared/call_tensors.h"

#include <algorithm>
#include <utility>

#include "bindings/shared/make_tensor.h"
#include "layout/routing_map.h"

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

/// Views a tensor of one type with one row for each token.
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

/// The choices and weights of @p seen, whose rows are known, of a routing map.
bool view_listed(const ops::EndpointBase& endpoint,
                 const TensorView& map,
                 py::handle probs,
                 DispatchTensors* seen) {
  // Kernels read choices where they lie, and a map on a device is listed there.
  if (endpoint.dlpack_device_type() != DlpackDevice{}.type || !endpoint.is_host_caller())
    return false;
  const int64_t num_tokens = seen->rows.num_rows;
  const auto dense = view_weights(endpoint, probs, num_tokens, map.row_elements);
  if (!dense)
    return false;
  auto listed =
      std::make_shared<ListedChoices>(list_choices(map, *dense, endpoint.config().num_max_topk));
  seen->choices = {reinterpret_cast<std::byte*>(listed->topk_idx.data()),
                   num_tokens,
                   listed->num_topk,
                   sizeof(int64_t)};
  if (dense->element_bytes > 0)
    seen->weights = {
        listed->weights.data(), num_tokens, seen->choices.row_elements, dense->element_bytes};
  seen->listed = std::move(listed);
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

/// Rows that can travel.
/// @param hidden  Elements of one, or kAnyNumber
/// @param type    Written: that of an element
std::optional<TensorView> view_rows(const ops::EndpointBase& endpoint,
                                    py::handle rows,
                                    int64_t hidden,
                                    int32_t* type) {
  DlpackTensor found;
  const auto view = view_matrix(endpoint, rows, hidden, &found);
  if (!view || view->row_bytes() % ops::kRowUnit != 0)
    return std::nullopt;
  *type = found.type();
  return view;
}

/// Views tensors of a dispatch to the places of the plan of @p options, whose layout, alignment and
/// capacity hold.
std::optional<DispatchTensors> see_cached_dispatch(const ops::EndpointBase& endpoint,
                                                   py::handle x,
                                                   py::handle topk_idx,
                                                   py::handle topk_weights,
                                                   const ops::DispatchParams& options) {
  const ops::PlanHeader& plan = *options.plan;
  const bool is_plan_of_options =
      (options.layout == layout::RowLayout::kExpertMajor || options.layout == plan.layout()) &&
      (options.expert_alignment == 1 ||
       options.expert_alignment == plan.arrangement.expert_alignment);
  if (!topk_idx.is_none() || !is_plan_of_options || options.has_capacity())
    return std::nullopt;
  DispatchTensors seen;
  const auto rows = view_rows(endpoint, x, kAnyNumber, &seen.row_type);
  if (!rows || rows->num_rows != plan.num_tokens || !summable(seen.row_type))
    return std::nullopt;
  const auto weights = view_weights(endpoint, topk_weights, plan.num_tokens, plan.num_topk);
  if (!weights)
    return std::nullopt;
  seen.rows = *rows;
  seen.weights = *weights;
  return seen;
}

}  // namespace

ListedChoices list_choices(const TensorView& map, const TensorView& probs, int64_t least_topk) {
  const layout::RoutingMap chosen{
      reinterpret_cast<const uint8_t*>(map.data), map.num_rows, map.row_elements};
  ListedChoices listed;
  listed.num_topk = std::max(chosen.num_topk(), least_topk);
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

std::optional<DispatchTensors> see_dispatch(const ops::EndpointBase& endpoint,
                                            py::handle x,
                                            py::handle topk_idx,
                                            py::handle topk_weights,
                                            const ops::DispatchParams& options) {
  if (options.plan)
    return see_cached_dispatch(endpoint, x, topk_idx, topk_weights, options);
  const ops::EndpointConfig& config = endpoint.config();
  DispatchTensors seen;
  const auto rows = view_rows(endpoint, x, config.hidden, &seen.row_type);
  if (!rows || !(config.row_type == 0 ? summable(seen.row_type).has_value()
                                      : seen.row_type == config.row_type))
    return std::nullopt;
  const int64_t num_tokens = rows->num_rows;
  const bool is_low_latency = options.layout == layout::RowLayout::kLowLatency;
  if (config.num_max_tokens == 0 ? is_low_latency : num_tokens > config.num_max_tokens)
    return std::nullopt;
  seen.rows = *rows;
  DlpackTensor found;
  const auto choices = view_matrix(endpoint, topk_idx, kAnyNumber, &found);
  if (!choices || choices->num_rows != num_tokens)
    return std::nullopt;
  if (found.type() == kBool) {
    if (choices->row_elements != layout::num_ids(options.replicas.get(), endpoint.placement()) ||
        !view_listed(endpoint, *choices, topk_weights, &seen))
      return std::nullopt;
  } else {
    const auto weights = view_weights(endpoint, topk_weights, num_tokens, choices->row_elements);
    if (found.type() != kInt64 || !weights)
      return std::nullopt;
    seen.choices = *choices;
    seen.weights = *weights;
  }
  if (config.num_max_topk != 0 && seen.choices.row_elements != config.num_max_topk)
    return std::nullopt;
  return seen;
}

std::optional<CombineTensors> see_combine(const ops::EndpointBase& endpoint,
                                          const ops::PlanHeader& plan,
                                          py::handle expert_out,
                                          py::handle topk_weights,
                                          py::handle out) {
  int32_t type = 0;
  const auto rows = view_rows(endpoint, expert_out, kAnyNumber, &type);
  if (!rows || rows->num_rows != plan.num_rows())
    return std::nullopt;
  const std::optional<DType> dtype = summable(type);
  const auto weights = view_weights(endpoint, topk_weights, plan.num_tokens, plan.num_topk);
  if (!dtype || !weights || (plan.arrangement.is_by_rank() && !topk_weights.is_none()))
    return std::nullopt;
  CombineTensors seen{*dtype, *rows, *weights, {}, {}};
  if (!out.is_none()) {
    const auto sums = view_per_token(endpoint, out, type, plan.num_tokens, rows->row_elements);
    if (!sums || share_bytes(*sums, seen.rows) || share_bytes(*sums, seen.weights))
      return std::nullopt;
    seen.out = *sums;
  }
  return seen;
}

}  // namespace moe::bindings
