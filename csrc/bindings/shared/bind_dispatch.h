#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/shared/call_tensors.h"
#include "bindings/shared/submitted.h"
#include "bindings/shared/tensor_view.h"
#include "core/error.h"
#include "ops/dispatch.h"

namespace moe::bindings {

/// DLPack's types of what a dispatch hands out. What DLPack cannot name is handed out as bytes,
/// scale factors as integers of their size.
struct TensorTypes {
  int32_t rows = 0;
  int32_t scales = 0;
};

/// A dispatch as Python holds it. The window of a low-latency dispatch is known before its rows
/// are, so its tensors can be had at once.
class SubmittedDispatch : public Submitted<ops::DispatchOutcome> {
 public:
  template <typename Body>
  SubmittedDispatch(std::shared_ptr<ops::EndpointBase> endpoint,
                    std::shared_ptr<void> inputs,
                    const Body& body,
                    const ops::DispatchParams& params,
                    const TensorTypes& types,
                    bool is_async)
      : Submitted(std::move(endpoint), std::move(inputs), body, is_async, true),
        row_bytes_(params.row_bytes),
        weight_bytes_(params.weight_bytes),
        num_scales_(params.num_scales),
        types_(types),
        window_(params.window) {
    if (!window_)
      return;
    window_layout_ = ops::low_latency_window(*this->endpoint(), params);
    num_window_rows_ = ops::num_low_latency_rows(*this->endpoint());
  }

  /// Plan of the endpoint's own kind.
  std::shared_ptr<const ops::PlanHeader> plan() { return wait().plan; }

  /// `[M, hidden]`, or bytes `[M, row_bytes]`.
  py::object x() {
    if (window_)
      return window_tensor(0, rows_form(num_window_rows_));
    const ops::DispatchOutcome& outcome = wait();
    return make_tensor(outcome.owner, outcome.rows, rows_form(outcome.plan->num_rows()), device());
  }

  /// `[M, num_scales]`, low-latency `[num_local_experts, M / num_local_experts, num_scales]`, or
  /// None.
  py::object x_sf() {
    if (num_scales_ == 0)
      return py::none();
    if (window_)
      return window_tensor(window_layout_.scales_offset,
                           scales_form(window_layout_.scales, num_window_rows_));
    const ops::DispatchOutcome& outcome = wait();
    return make_tensor(outcome.owner,
                       outcome.scales,
                       scales_form(outcome.scale_map, outcome.plan->num_rows()),
                       device());
  }

  py::object topk_idx() {
    const ops::DispatchOutcome& outcome = wait();
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
      return window_tensor(window_layout_.weights_offset, {{num_window_rows_}, type});
    const ops::DispatchOutcome& outcome = wait();
    const int64_t num_rows = outcome.plan->num_rows();
    if (outcome.plan->arrangement.is_by_rank())
      return make_tensor(
          outcome.owner, outcome.weights, {num_rows, outcome.plan->num_recv_topk}, type, device());
    return make_tensor(outcome.owner, outcome.weights, {num_rows}, type, device());
  }

  py::object num_tokens_per_expert() {
    const ops::DispatchOutcome& outcome = wait();
    const auto& counts = counted_plan().received.num_tokens_per_expert;
    const auto size = static_cast<int64_t>(counts.size());
    if (outcome.num_tokens_per_expert)
      return make_tensor(outcome.num_tokens_per_expert,
                         outcome.num_tokens_per_expert.get(),
                         {size},
                         kInt64,
                         device());
    return vector_tensor(counts, {size}, kInt64);
  }

  py::object expert_offsets() {
    const ops::DispatchOutcome& outcome = wait();
    const auto& starts = outcome.plan->received.expert_offsets;
    const auto size = static_cast<int64_t>(starts.size());
    if (outcome.expert_offsets)
      return make_tensor(
          outcome.expert_offsets, outcome.expert_offsets.get(), {size}, kInt32, device());
    return vector_tensor(std::vector<int32_t>(starts.begin(), starts.end()), {size}, kInt32);
  }

  py::object num_dropped_per_expert() {
    check_host_knows("num_dropped_per_expert");
    const std::vector<int64_t> dropped = counted_plan().num_dropped_per_expert();
    return vector_tensor(dropped, {static_cast<int64_t>(dropped.size())}, kInt64);
  }

  /// int32 `[2]` of a dispatch that was captured, see kernels::Tables::status; else None.
  py::object status() {
    const ops::DispatchOutcome& outcome = wait();
    if (!outcome.status)
      return py::none();
    return make_tensor(outcome.status, outcome.status.get(), {2}, kInt32, device());
  }

  int64_t num_required_rows() {
    check_host_knows("num_required_rows");
    return counted_plan().asked.num_rows;
  }

  /// Words of the ranks on gradients, united; see layout::GradientWord.
  int32_t gradients() { return wait().gradients; }

  py::object wait_ns() {
    const ops::DispatchOutcome& outcome = wait();
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
  /// Returns the plan with its counts, where they come later.
  const ops::PlanHeader& counted_plan() {
    const ops::PlanHeader& plan = *wait().plan;
    await_verdict(plan.verdict);
    return plan;
  }

  void check_host_knows(const char* what) {
    MOE_CHECK(!wait().status,
              "the host does not know ",
              what,
              " of a dispatch in a capture: DispatchResult.status says it, on the device");
  }

  TensorForm rows_form(int64_t num_rows) const {
    const int bits = types_.rows & 0xFF;
    return {{num_rows, row_bytes_ * 8 / bits}, types_.rows};
  }

  TensorForm scales_form(const layout::ScaleMap& map, int64_t num_rows) const {
    if (window_) {
      const auto arrangement = ops::arrangement_of(*endpoint(), layout::RowLayout::kLowLatency, 1);
      const int64_t num_places = arrangement.rows_per_expert;
      const auto& local_experts = endpoint()->placement().local_experts;
      const auto num_local_experts =
          static_cast<int64_t>(local_experts[static_cast<size_t>(endpoint()->rank_idx())].size());
      if (map.is_column_major)
        return {{num_local_experts, num_places, num_scales_},
                {num_places * num_scales_, 1, num_places},
                types_.scales};
      return {{num_local_experts, num_places, num_scales_}, types_.scales};
    }
    // Torch wants a stride of no rows, too.
    if (map.is_column_major)
      return {{num_rows, num_scales_}, {1, std::max<int64_t>(map.group_stride, 1)}, types_.scales};
    return {{num_rows, num_scales_}, types_.scales};
  }

  /// Tensor over a part of the low-latency window.
  py::object window_tensor(int64_t offset, const TensorForm& form) const {
    return make_tensor(window_, window_->data() + offset, form, device());
  }

  int64_t row_bytes_;
  int32_t weight_bytes_;
  int64_t num_scales_;
  TensorTypes types_;
  std::shared_ptr<Window> window_;
  layout::ReceiveWindow window_layout_;
  int64_t num_window_rows_ = 0;
};

/// Arguments of the method dispatch() of an endpoint; see moe_comm/ep/backends/native_endpoint.py.
struct DispatchArguments {
  py::handle x;
  py::handle x_sf;
  py::handle topk_idx;
  py::handle topk_weights;
  std::shared_ptr<const ops::PlanHeader> plan;
  const std::optional<py::tuple>& scales;
  const py::tuple& options;
  std::optional<int32_t> row_type;  ///< row type of arguments that have passed every rule
};

/// A dispatch whose arguments have been read.
struct DispatchCall {
  ops::DispatchParams params;
  TensorTypes types;
  std::shared_ptr<const ListedChoices> listed;  ///< see DispatchTensors
};

/// @return false where a glance at arguments that nobody has checked does not suffice.
bool read_dispatch(ops::EndpointBase& endpoint,
                   const DispatchArguments& arguments,
                   DispatchCall* call);

/// A Python object that keeps @p listed.
py::object capsule_of(std::shared_ptr<const ListedChoices> listed);

/// @param tensors  tensors() are those of the call, as a tuple.
template <typename EndpointT, typename MakeTuple>
std::unique_ptr<SubmittedDispatch> submit_dispatch(std::shared_ptr<EndpointT> endpoint,
                                                   const ops::DispatchParams& params,
                                                   const TensorTypes& types,
                                                   const MakeTuple& tensors) {
  std::shared_ptr<void> inputs = keep_inputs(*endpoint, params.is_async, tensors);
  auto* const raw = endpoint.get();
  return std::make_unique<SubmittedDispatch>(
      std::move(endpoint),
      std::move(inputs),
      [raw, params](const group::InterruptCheck& check) { return dispatch(*raw, params, check); },
      params,
      types,
      params.is_async);
}

/// Adds SubmittedDispatch to @p module, known to no other.
py::class_<SubmittedDispatch> bind_submitted_dispatch(py::module_& module);

/// Adds SubmittedDispatch to @p module, dispatch() to @p endpoint_class.
/// Operations run by dispatch(EndpointT&, const ops::DispatchParams&, const
/// group::InterruptCheck&).
template <typename EndpointT, typename PlanT>
void bind_dispatch(py::module_& module,
                   py::class_<EndpointT, std::shared_ptr<EndpointT>>& endpoint_class) {
  const auto plan_of = [](SubmittedDispatch& self) {
    return std::static_pointer_cast<PlanT>(std::const_pointer_cast<ops::PlanHeader>(self.plan()));
  };
  // Results that a caller with a backward looks at: each by itself takes as long as all of them.
  const auto outputs_of = [plan_of](SubmittedDispatch& submitted, bool with_counts) -> py::object {
    return py::make_tuple(plan_of(submitted),
                          submitted.x(),
                          submitted.topk_weights(),
                          with_counts ? submitted.num_tokens_per_expert() : py::none(),
                          submitted.gradients());
  };
  bind_submitted_dispatch(module).def("plan", plan_of);
  // pybind11 would make sure of a plan that is None in a second reading of all arguments.
  endpoint_class.def(
      "dispatch",
      [outputs_of](std::shared_ptr<EndpointT> endpoint,
                   py::handle x,
                   py::handle x_sf,
                   py::handle topk_idx,
                   py::handle topk_weights,
                   const std::optional<std::shared_ptr<PlanT>>& plan,
                   const std::optional<py::tuple>& scales,
                   const py::tuple& options,
                   std::optional<int32_t> row_type) -> py::object {
        endpoint->group().check_process("dispatch");
        DispatchCall call;
        if (!read_dispatch(*endpoint,
                           {x,
                            x_sf,
                            topk_idx,
                            topk_weights,
                            plan.value_or(nullptr),
                            scales,
                            options,
                            row_type},
                           &call))
          return py::none();
        if (call.params.is_async)
          call.params.caller_mark = endpoint->mark_caller();
        auto made = submit_dispatch(std::move(endpoint), call.params, call.types, [&] {
          return py::make_tuple(x, x_sf, topk_idx, topk_weights, capsule_of(call.listed));
        });
        SubmittedDispatch& submitted = *made;
        const py::object handed_out = py::cast(std::move(made));
        const bool is_map = call.listed != nullptr;
        const bool needs_outputs =
            !call.params.is_async && (is_map || call.params.arguments.gradients != 0);
        return py::make_tuple(handed_out,
                              needs_outputs ? outputs_of(submitted, is_map) : py::none());
      });
}

}  // namespace moe::bindings
