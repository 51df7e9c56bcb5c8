#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/shared/bind_combine.h"
#include "bindings/shared/bind_dispatch.h"
#include "bindings/shared/native_group.h"
#include "bindings/shared/without_gil.h"

namespace moe::bindings {

/// The communicator's parts that @p settings, a `Settings` of
/// moe_comm/ep/backends/native_endpoint.py, names.
std::shared_ptr<NativeGroup> native_group_of(py::handle settings);

/// Configuration of an endpoint in @p settings, whatever runs its operations.
ops::EndpointConfig endpoint_config_of(py::handle settings);

/// @throws InvalidArgument  they do not fit each other.
std::shared_ptr<layout::Replicas> make_replicas(const std::vector<int32_t>& slot_expert,
                                                int num_experts,
                                                int num_local_ranks,
                                                const layout::Placement& placement);

py::list take_trace(ops::EndpointBase& endpoint);

/// A window for the rows of a plan, `[rows, hidden]`.
py::object empty_rows(ops::EndpointBase& endpoint,
                      const ops::PlanHeader& plan,
                      int64_t hidden,
                      int64_t row_bytes,
                      int32_t dtype);

/// (counts, slots, topk_idx, asked), see PlanTensors; copied, in host memory.
py::tuple plan_tensors(const ops::Plan& plan);

/// The plan that tensors in host memory were exported from.
/// @param hash  PlanHeader::hash; 0 for that of its counts
/// @throws InvalidArgument  they do not fit the endpoint or each other.
ops::Plan plan_of_tensors(const ops::EndpointBase& endpoint,
                          py::handle counts,
                          py::handle topk_idx,
                          py::handle asked,
                          int layout,
                          int64_t expert_alignment,
                          int64_t hash);

/// @p endpoint, whose end, when Python drops it, waits without the GIL: the progress thread may
/// want that to drop an operation's inputs.
template <typename EndpointT>
std::shared_ptr<EndpointT> drop_without_gil(std::shared_ptr<EndpointT> endpoint) {
  auto* const address = endpoint.get();
  return std::shared_ptr<EndpointT>(address, [endpoint](EndpointT*) mutable {
    if (!Py_IsInitialized() || PyGILState_Check() == 0) {
      endpoint.reset();
      return;
    }
    const py::gil_scoped_release released;
    endpoint.reset();
  });
}

/// Adds Plan to @p module.
template <typename PlanT>
py::class_<PlanT, std::shared_ptr<PlanT>> bind_plan(py::module_& module) {
  return py::class_<PlanT, std::shared_ptr<PlanT>>(module, "Plan", py::module_local())
      .def_property_readonly(
          "sizes",
          [](const PlanT& self) {
            await_verdict(self.verdict);
            return py::make_tuple(
                self.num_tokens, self.num_topk, self.num_rows(), self.num_recv_topk);
          })
      .def("total_choices",
           [](const PlanT& self, bool waits) -> py::object {
             if (!waits && self.awaits_counts())
               return py::none();
             await_verdict(self.verdict);
             std::vector<int64_t> choices = self.counts.to_experts(self.counts.num_ranks);
             const auto num_experts = static_cast<int64_t>(choices.size());
             return vector_tensor(std::move(choices), {num_experts}, kInt64);
           })
      .def_property_readonly("expert_alignment",
                             [](const PlanT& self) { return self.arrangement.expert_alignment; })
      .def_property_readonly("layout",
                             [](const PlanT& self) { return static_cast<int>(self.layout()); });
}

/// Adds to @p endpoint_class what endpoints of every kind do alike.
///
/// Rejected calls run by reject_operation(EndpointT&, ...), see ops/exchange.h.
template <typename EndpointT, typename PlanT>
void bind_endpoint(py::module_& module,
                   py::class_<EndpointT, std::shared_ptr<EndpointT>>& endpoint_class) {
  bind_dispatch<EndpointT, PlanT>(module, endpoint_class);
  bind_combine<EndpointT, PlanT>(module, endpoint_class);
  endpoint_class
      .def("reject",
           [](EndpointT& endpoint,
              const std::string& operation,
              const std::string& message,
              bool is_type_error) {
             endpoint.group().check_process(operation.c_str());
             const py::gil_scoped_release no_gil;
             endpoint.progress().wait_idle(signal_check());
             reject_operation(endpoint,
                              operation == "combine" ? layout::Operation::kCombine
                                                     : layout::Operation::kDispatch,
                              is_type_error ? layout::RowStatus::kInvalidType
                                            : layout::RowStatus::kInvalidArgument,
                              message,
                              signal_check());
           })
      .def("can_quantize",
           [](const EndpointT& self, int32_t code) {
             const layout::QuantizationCode quantization{code};
             const layout::WireFormat* const format = quantization.find_format();
             return format != nullptr && self.can_quantize(*format, quantization.scale());
           })
      .def("empty_rows",
           [](EndpointT& endpoint,
              const PlanT& plan,
              int64_t hidden,
              int64_t row_bytes,
              int32_t dtype) { return empty_rows(endpoint, plan, hidden, row_bytes, dtype); })
      .def("balance_replicas",
           [](EndpointT& endpoint,
              const std::optional<std::vector<int32_t>>& slot_expert,
              int num_experts,
              int num_local_ranks) {
             const py::gil_scoped_release no_gil;
             endpoint.balance_replicas(
                 slot_expert ? make_replicas(
                                   *slot_expert, num_experts, num_local_ranks, endpoint.placement())
                             : nullptr);
           })
      .def_property_readonly("buffer_number",
                             [](const EndpointT& self) { return self.buffer_number(); })
      .def("wait_statistics",
           [](const EndpointT& self) {
             self.group().check_fork("wait_statistics");
             const ops::WaitStatistics statistics = self.wait_statistics();
             return py::make_tuple(statistics.waited_ns, statistics.num_waits);
           })
      .def("enable_trace", [](EndpointT& self) { self.tracer().enable(); })
      .def("take_trace", [](EndpointT& self) { return take_trace(self); })
      .def(
          "destroy",
          [](EndpointT& self) {
            self.destroy(signal_check());
            if (const std::exception_ptr error = self.take_untold_error())
              std::rethrow_exception(error);
          },
          NoGil());
}

}  // namespace moe::bindings
