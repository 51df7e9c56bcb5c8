#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/shared/plain_call.h"
#include "bindings/shared/submitted.h"
#include "bindings/shared/tensor_view.h"
#include "core/error.h"
#include "ops/dispatch.h"

namespace moe::bindings {

/// A dispatch as Python holds it. The window of a low-latency dispatch is known before its rows
/// are, so its tensors can be had at once.
class SubmittedDispatch : public Submitted<host::DispatchOutcome> {
 public:
  template <typename Body>
  SubmittedDispatch(std::shared_ptr<host::EndpointBase> endpoint,
                    std::shared_ptr<void> inputs,
                    const Body& body,
                    const host::DispatchParams& params,
                    int64_t hidden,
                    bool is_async)
      : Submitted(std::move(endpoint), std::move(inputs), body, is_async, true),
        hidden_(hidden),
        row_bytes_(params.row_bytes),
        dtype_(params.dtype),
        weight_bytes_(params.weight_bytes),
        num_scales_(params.num_scales),
        is_bytes_(params.is_quantized_here || params.dtype >= kFirstOpaqueType),
        window_(params.window) {
    if (!window_)
      return;
    window_layout_ = host::low_latency_window(*this->endpoint(), params);
    num_window_rows_ = host::num_low_latency_rows(*this->endpoint());
  }

  /// Of the endpoint's own kind.
  std::shared_ptr<const host::PlanHeader> plan() { return wait().plan; }

  /// `[M, hidden]`, or bytes `[M, row_bytes]` where DLPack cannot name the dtype.
  py::object x() {
    if (window_)
      return rows_tensor(window_, window_->data(), num_window_rows_);
    const host::DispatchOutcome& outcome = wait();
    return rows_tensor(outcome.owner, outcome.rows, outcome.plan->num_rows());
  }

  /// Scale factors as they lie in memory, `[elements]` of an integer type of their size, or None.
  py::object x_sf() {
    if (num_scales_ == 0)
      return py::none();
    if (window_)
      return scales_tensor(window_,
                           window_->data() + window_layout_.scales_offset,
                           window_layout_.scales,
                           num_window_rows_);
    const host::DispatchOutcome& outcome = wait();
    return scales_tensor(
        outcome.owner, outcome.scales, outcome.scale_map, outcome.plan->num_rows());
  }

  py::object topk_idx() {
    const host::DispatchOutcome& outcome = wait();
    if (!outcome.has_topk_idx)
      return py::none();
    return make_tensor(outcome.owner,
                       outcome.topk_idx,
                       {outcome.plan->num_rows(), outcome.plan->num_recv_topk},
                       kInt64,
                       device());
  }

  py::object topk_weights() {
    if (weight_bytes_ == 0)
      return py::none();
    const int32_t type = weight_type(weight_bytes_);
    if (window_)
      return make_tensor(window_,
                         window_->data() + window_layout_.weights_offset,
                         {num_window_rows_},
                         type,
                         device());
    const host::DispatchOutcome& outcome = wait();
    const int64_t num_rows = outcome.plan->num_rows();
    if (outcome.plan->arrangement.is_by_rank())
      return make_tensor(
          outcome.owner, outcome.weights, {num_rows, outcome.plan->num_recv_topk}, type, device());
    return make_tensor(outcome.owner, outcome.weights, {num_rows}, type, device());
  }

  py::object num_tokens_per_expert() {
    const host::DispatchOutcome& outcome = wait();
    hear(outcome.plan->verdict);
    const auto& counts = outcome.plan->received.num_tokens_per_expert;
    if (outcome.num_tokens_per_expert)
      return make_tensor(outcome.num_tokens_per_expert,
                         outcome.num_tokens_per_expert.get(),
                         {static_cast<int64_t>(counts.size())},
                         kInt64,
                         device());
    return vector_tensor(counts, {static_cast<int64_t>(counts.size())}, kInt64);
  }

  py::object expert_offsets() {
    const host::DispatchOutcome& outcome = wait();
    const auto& starts = outcome.plan->received.expert_offsets;
    if (outcome.expert_offsets)
      return make_tensor(outcome.expert_offsets,
                         outcome.expert_offsets.get(),
                         {static_cast<int64_t>(starts.size())},
                         kInt32,
                         device());
    return vector_tensor(std::vector<int32_t>(starts.begin(), starts.end()),
                         {static_cast<int64_t>(starts.size())},
                         kInt32);
  }

  py::object num_dropped_per_expert() {
    check_host_knows("num_dropped_per_expert");
    const host::LateCounts* const late = late_counts();
    const auto& dropped = late ? late->num_dropped_per_expert : wait().num_dropped_per_expert;
    return vector_tensor(dropped, {static_cast<int64_t>(dropped.size())}, kInt64);
  }

  /// int32 `[2]` of a dispatch that was captured, see kernels::Tables::status; else None.
  py::object status() {
    const host::DispatchOutcome& outcome = wait();
    if (!outcome.status)
      return py::none();
    return make_tensor(outcome.status, outcome.status.get(), {2}, kInt32, device());
  }

  int64_t num_required_rows() {
    check_host_knows("num_required_rows");
    const host::LateCounts* const late = late_counts();
    return late ? late->num_required_rows : wait().num_required_rows;
  }

  /// What the ranks say of gradients, united; see layout::GradientWord.
  int32_t gradients() { return wait().gradients; }

  py::object wait_ns() {
    const host::DispatchOutcome& outcome = wait();
    std::vector<int64_t> waited_ns = outcome.waited_ns;
    if (outcome.end) {
      const std::vector<int64_t> more_ns = outcome.end->waited_ns();
      for (size_t i = 0; i < more_ns.size(); ++i)
        waited_ns[i] += more_ns[i];
    }
    const auto num_ranks = static_cast<int64_t>(waited_ns.size());
    return vector_tensor(std::move(waited_ns), {num_ranks}, kInt64);
  }

 private:
  /// Null where the outcome has them.
  const host::LateCounts* late_counts() {
    const host::DispatchOutcome& outcome = wait();
    if (outcome.late_counts)
      hear(outcome.verdict);
    return outcome.late_counts.get();
  }

  void check_host_knows(const char* what) {
    MOE_CHECK(!wait().status,
              "the host does not know ",
              what,
              " of a dispatch in a capture: DispatchResult.status says it, on the device");
  }

  /// Rows of a dtype that DLPack cannot name are handed out as bytes.
  py::object rows_tensor(std::shared_ptr<void> owner, std::byte* rows, int64_t num_rows) const {
    if (is_bytes_)
      return make_tensor(
          std::move(owner), rows, {num_rows, row_bytes_}, dlpack_type(DType::kBytes), device());
    return make_tensor(std::move(owner), rows, {num_rows, hidden_}, dtype_, device());
  }

  py::object scales_tensor(std::shared_ptr<void> owner,
                           std::byte* scales,
                           const layout::ScaleMap& map,
                           int64_t num_rows) const {
    const auto bits = static_cast<int32_t>(map.scale_bytes * 8);
    const int32_t type = bits == 8 ? dlpack_type(DType::kBytes) : bits;
    return make_tensor(
        std::move(owner), scales, {map.bytes(num_rows) / map.scale_bytes}, type, device());
  }

  int64_t hidden_;
  int64_t row_bytes_;
  int32_t dtype_;
  int32_t weight_bytes_;
  int64_t num_scales_;
  bool is_bytes_;
  std::shared_ptr<Window> window_;
  layout::ReceiveWindow window_layout_;
  int64_t num_window_rows_ = 0;
};

/// Arguments of the method dispatch() of an endpoint; see moe_comm/ep/backends/native_endpoint.py.
struct DispatchArguments {
  py::object x;
  py::object x_sf;
  py::object topk_idx;
  py::object topk_weights;
  std::shared_ptr<const host::PlanHeader> plan;
  int32_t dtype;
  std::optional<py::tuple> scales;
  std::optional<py::tuple> capacity;
  py::tuple options;  ///< a DispatchOptions of moe_comm/ep/config.py
};

/// @param hidden  elements of a row of x
host::DispatchParams dispatch_params_of(host::EndpointBase& endpoint,
                                        DispatchArguments& arguments,
                                        int64_t* hidden);
host::DispatchParams dispatch_params_of(host::EndpointBase& endpoint,
                                        const PlainDispatch& plain,
                                        int layout,
                                        int64_t expert_alignment,
                                        int32_t gradients);

/// A Python object that keeps @p listed.
py::object capsule_of(std::shared_ptr<const ListedChoices> listed);

/// @param tensors  tensors() are those of the call, as a tuple.
template <typename EndpointT, typename MakeTuple>
std::unique_ptr<SubmittedDispatch> submit_dispatch(std::shared_ptr<EndpointT> endpoint,
                                                   const host::DispatchParams& params,
                                                   int64_t hidden,
                                                   const MakeTuple& tensors) {
  std::shared_ptr<void> inputs = keep_inputs(*endpoint, params.is_async, tensors);
  auto* const raw = endpoint.get();
  return std::make_unique<SubmittedDispatch>(
      std::move(endpoint),
      std::move(inputs),
      [raw, params](const host::InterruptCheck& check) { return dispatch(*raw, params, check); },
      params,
      hidden,
      params.is_async);
}

/// Adds SubmittedDispatch to @p module, known to no other.
py::class_<SubmittedDispatch> bind_submitted_dispatch(py::module_& module);

/// Adds SubmittedDispatch to @p module, dispatch() and dispatch_plain() to @p endpoint_class.
/// Operations run by dispatch(EndpointT&, const host::DispatchParams&, const
/// host::InterruptCheck&).
template <typename EndpointT, typename PlanT>
void bind_dispatch(py::module_& module,
                   py::class_<EndpointT, std::shared_ptr<EndpointT>>& endpoint_class) {
  bind_submitted_dispatch(module).def("plan", [](SubmittedDispatch& self) {
    return std::static_pointer_cast<PlanT>(std::const_pointer_cast<host::PlanHeader>(self.plan()));
  });
  endpoint_class.def(
      "dispatch",
      [](std::shared_ptr<EndpointT> endpoint,
         py::object x,
         py::object x_sf,
         py::object topk_idx,
         py::object topk_weights,
         std::shared_ptr<PlanT> plan,
         int32_t dtype,
         std::optional<py::tuple> scales,
         std::optional<py::tuple> capacity,
         py::tuple options) {
        endpoint->group().check_process("dispatch");
        DispatchArguments arguments{std::move(x),
                                    std::move(x_sf),
                                    std::move(topk_idx),
                                    std::move(topk_weights),
                                    std::move(plan),
                                    dtype,
                                    std::move(scales),
                                    std::move(capacity),
                                    std::move(options)};
        int64_t hidden = 0;
        host::DispatchParams params = dispatch_params_of(*endpoint, arguments, &hidden);
        if (params.is_async)
          params.caller_mark = endpoint->mark_caller();
        return submit_dispatch(std::move(endpoint), params, hidden, [&] {
          return py::make_tuple(
              arguments.x, arguments.x_sf, arguments.topk_idx, arguments.topk_weights);
        });
      });
  endpoint_class.def(
      "dispatch_plain",
      [](std::shared_ptr<EndpointT> endpoint,
         py::handle x,
         py::handle topk_idx,
         py::handle topk_weights,
         int layout,
         int64_t expert_alignment,
         int32_t gradients,
         bool is_map) -> std::unique_ptr<SubmittedDispatch> {
        endpoint->group().check_process("dispatch");
        const auto plain = view_plain_dispatch(*endpoint,
                                               x,
                                               topk_idx,
                                               topk_weights,
                                               static_cast<layout::RowLayout>(layout),
                                               expert_alignment,
                                               is_map);
        if (!plain)
          return nullptr;
        const auto params =
            dispatch_params_of(*endpoint, *plain, layout, expert_alignment, gradients);
        return submit_dispatch(std::move(endpoint), params, plain->rows.row_elements, [&] {
          return py::make_tuple(x, topk_idx, topk_weights, capsule_of(plain->listed));
        });
      });
}

}  // namespace moe::bindings
