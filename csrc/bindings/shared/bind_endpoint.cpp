#include "bindings/shared/bind_endpoint.h"

namespace moe::bindings {

host::EndpointConfig endpoint_config_of(int num_experts,
                                        int64_t num_max_tokens,
                                        std::vector<int32_t> expert_rank,
                                        int depth,
                                        std::string isa,
                                        std::vector<std::pair<std::string, std::string>> agreed) {
  host::EndpointConfig config;
  config.num_experts = num_experts;
  config.num_max_tokens = num_max_tokens;
  config.expert_rank = std::move(expert_rank);
  config.depth = depth;
  config.isa = std::move(isa);
  config.agreed = std::move(agreed);
  return config;
}

py::capsule empty_rows(host::EndpointBase& endpoint,
                       const host::PlanHeader& plan,
                       int64_t hidden,
                       int64_t row_bytes,
                       int32_t dtype) {
  std::shared_ptr<Window> window;
  {
    const py::gil_scoped_release no_gil;
    window = endpoint.memory().allocate(static_cast<uint64_t>(plan.num_rows() * row_bytes));
  }
  std::byte* const data = window->data();
  return make_dlpack(std::move(window),
                     data,
                     {plan.num_rows(), hidden},
                     dtype,
                     {endpoint.dlpack_device_type(), endpoint.device_idx()});
}

py::list take_trace(host::EndpointBase& endpoint) {
  py::list records;
  for (const host::TraceRecord& record : endpoint.tracer().take())
    records.append(py::make_tuple(record.epoch,
                                  layout::operation_name(record.operation),
                                  record.phase,
                                  record.start_ns,
                                  record.end_ns,
                                  record.peer_rank));
  return records;
}

}  // namespace moe::bindings
