#include "bindings/shared/bind_endpoint.h"

#include <algorithm>

#include "bindings/shared/count_matrix.h"
#include "bindings/shared/without_gil.h"

namespace moe::bindings {

std::shared_ptr<NativeGroup> native_group_of(py::handle settings) {
  return settings.attr("group").cast<std::shared_ptr<NativeGroup>>();
}

ops::EndpointConfig endpoint_config_of(py::handle settings) {
  ops::EndpointConfig config;
  config.num_experts = settings.attr("num_experts").cast<int>();
  config.num_max_tokens = std::max<int64_t>(settings.attr("num_max_tokens").cast<int64_t>(), 0);
  config.num_max_topk = settings.attr("num_max_topk").cast<int64_t>();
  config.max_row_bytes = settings.attr("max_row_bytes").cast<int64_t>();
  config.hidden = settings.attr("hidden").cast<int64_t>();
  config.row_type = settings.attr("row_type").cast<int32_t>();
  config.expert_rank = settings.attr("expert_rank").cast<std::vector<int32_t>>();
  config.depth = settings.attr("depth").cast<int>();
  config.num_low_latency_windows = settings.attr("num_low_latency_windows").cast<int>();
  config.node_reduction = settings.attr("node_reduction").cast<bool>();
  config.balances_replicas = settings.attr("balances_replicas").cast<bool>();
  config.rank_reduction = settings.attr("rank_reduction").cast<bool>();
  config.agreed = settings.attr("agreed").cast<std::vector<std::pair<std::string, std::string>>>();
  return config;
}

py::object empty_rows(ops::EndpointBase& endpoint,
                      const ops::PlanHeader& plan,
                      int64_t hidden,
                      int64_t row_bytes,
                      int32_t dtype) {
  auto window = without_gil([&] {
    return endpoint.memory().allocate(static_cast<uint64_t>(plan.num_rows() * row_bytes));
  });
  std::byte* const data = window->data();
  return make_tensor(std::move(window),
                     data,
                     {plan.num_rows(), hidden},
                     dtype,
                     {endpoint.dlpack_device_type(), endpoint.device_idx()});
}

std::shared_ptr<layout::Replicas> make_replicas(const std::vector<int32_t>& slot_expert,
                                                int num_experts,
                                                int num_local_ranks,
                                                const layout::Placement& placement) {
  MOE_CHECK(static_cast<int>(slot_expert.size()) == placement.num_experts && num_local_ranks > 0,
            "expected an expert for each of ",
            placement.num_experts,
            " slots, got ",
            slot_expert.size());
  MOE_CHECK(std::ranges::is_sorted(placement.expert_rank), "slots must ascend by rank");
  for (const int32_t expert_idx : slot_expert)
    MOE_CHECK(expert_idx >= -1 && expert_idx < num_experts,
              expert_idx,
              " is not an expert of ",
              num_experts);
  return std::make_shared<layout::Replicas>(slot_expert, num_experts, num_local_ranks, placement);
}

py::list take_trace(ops::EndpointBase& endpoint) {
  py::list records;
  for (const group::TraceRecord& record : endpoint.tracer().take())
    records.append(py::make_tuple(record.epoch,
                                  layout::operation_name(record.operation),
                                  record.phase,
                                  record.start_ns,
                                  record.end_ns,
                                  record.peer_rank));
  return records;
}

py::tuple plan_tensors(const ops::Plan& plan) {
  const int64_t num_ranks = plan.counts.num_ranks;
  std::vector<int64_t> asked = {plan.asked.num_rows};
  asked.insert(asked.end(),
               plan.asked.num_choices_per_expert.begin(),
               plan.asked.num_choices_per_expert.end());
  const auto num_asked = static_cast<int64_t>(asked.size());
  return py::make_tuple(
      vector_tensor(plan.counts.counts, {num_ranks, plan.counts.stride()}, kInt32),
      vector_tensor(plan.slots, {plan.num_tokens, plan.num_slots}, kInt64),
      vector_tensor(plan.topk_idx, {plan.num_tokens, plan.num_topk}, kInt64),
      vector_tensor(std::move(asked), {num_asked}, kInt64),
      static_cast<int64_t>(plan.hash));
}

ops::Plan plan_of_tensors(const ops::EndpointBase& endpoint,
                          py::handle counts,
                          py::handle topk_idx,
                          py::handle asked,
                          int layout,
                          int64_t expert_alignment,
                          int64_t hash) {
  const TensorView choices = view_tensor(topk_idx);
  const TensorView numbers = view_tensor(asked);
  const auto rank_idx = static_cast<size_t>(endpoint.rank_idx());
  const auto num_local_experts =
      static_cast<int64_t>(endpoint.placement().local_experts[rank_idx].size());
  MOE_CHECK(numbers.num_rows * numbers.row_elements == 1 + num_local_experts,
            "asked must have 1 + ",
            num_local_experts,
            " elements, got ",
            numbers.num_rows * numbers.row_elements);
  const auto* num_asked = reinterpret_cast<const int64_t*>(numbers.data);
  ops::AskedRows asked_rows{num_asked[0], {num_asked + 1, num_asked + 1 + num_local_experts}};
  layout::CountMatrix copied =
      count_matrix_of(counts, endpoint.num_ranks(), endpoint.config().num_experts);
  const py::gil_scoped_release no_gil;
  const auto* ids = reinterpret_cast<const int64_t*>(choices.data);
  const auto arrangement =
      ops::arrangement_of(endpoint, static_cast<layout::RowLayout>(layout), expert_alignment);
  check_plan(copied, choices, endpoint.placement(), arrangement.is_by_rank(), endpoint.rank_idx());
  auto plan = ops::Plan::make(arrangement,
                              std::move(copied),
                              std::move(asked_rows),
                              endpoint.placement(),
                              endpoint.rank_idx(),
                              {ids, ids + choices.num_rows * choices.row_elements},
                              choices.num_rows,
                              choices.row_elements);
  if (hash != 0)
    plan.hash = static_cast<uint64_t>(hash);
  return plan;
}

}  // namespace moe::bindings
