#pragma once

#include <memory>
#include <utility>

#include "bindings/shared/call_options.h"
#include "bindings/shared/call_tensors.h"
#include "bindings/shared/count_writes.h"
#include "bindings/shared/submitted.h"
#include "bindings/shared/tensor_view.h"
#include "ops/combine.h"

namespace moe::bindings {

/// A combine as Python holds it.
class SubmittedCombine : public Submitted<ops::CombineOutcome> {
 public:
  template <typename Body>
  SubmittedCombine(std::shared_ptr<ops::EndpointBase> endpoint,
                   std::shared_ptr<void> inputs,
                   const Body& body,
                   const ops::CombineParams& params)
      : Submitted(std::move(endpoint), std::move(inputs), body, params.is_async), params_(params) {}

  /// (sums or None, pulled weights or None, what all ranks say of gradients, see
  /// layout::GradientWord); sums is None where the caller gave `out`.
  py::tuple result() {
    const ops::CombineOutcome& outcome = wait();
    py::object weights = py::none();
    if (params_.row_weight_bytes > 0)
      weights = make_tensor(outcome.owner,
                            outcome.weights,
                            {params_.plan->num_tokens, params_.plan->num_topk},
                            weight_type(params_.row_weight_bytes),
                            device());
    const bool has_sums = params_.has_rows && params_.out == nullptr;
    return py::make_tuple(has_sums ? sums() : py::none(), weights, outcome.gradients);
  }

  /// (sums, what all ranks say of gradients)
  /// @param out  Tensor that the caller gave for the sums, or None
  py::tuple summed(py::handle out) {
    return py::make_tuple(out.is_none() ? sums() : py::reinterpret_borrow<py::object>(out),
                          wait().gradients);
  }

  py::object wait_ns() {
    const auto& waited_ns = wait().waited_ns;
    return vector_tensor(waited_ns, {static_cast<int64_t>(waited_ns.size())}, kInt64);
  }

 private:
  py::object sums() {
    const ops::CombineOutcome& outcome = wait();
    const TensorForm form({params_.plan->num_tokens, params_.hidden}, dlpack_type(params_.dtype));
    return make_tensor(outcome.owner, outcome.sums, form, device());
  }

  ops::CombineParams params_;
};

/// Adds SubmittedCombine to @p module, known to no other.
void bind_submitted_combine(py::module_& module);

/// Arguments of the method combine() of an endpoint; see moe_comm/ep/backends/native_endpoint.py.
struct CombineArguments {
  py::handle x;
  std::shared_ptr<const ops::PlanHeader> plan;
  py::handle topk_weights;
  py::handle row_weights;
  py::handle out;
  const py::tuple& options;
  std::optional<int32_t> dtype;  ///< row type of arguments that have passed every rule
};

/// Nothing where a glance at arguments that nobody has checked does not suffice.
std::optional<ops::CombineParams> read_combine(const ops::EndpointBase& endpoint,
                                               const CombineArguments& arguments);

/// @param tensors  tensors() are those of the call, as a tuple.
template <typename EndpointT, typename MakeTuple>
std::unique_ptr<SubmittedCombine> submit_combine(std::shared_ptr<EndpointT> endpoint,
                                                 const ops::CombineParams& params,
                                                 const MakeTuple& tensors) {
  std::shared_ptr<void> inputs = keep_inputs(*endpoint, params.is_async, tensors);
  auto* const raw = endpoint.get();
  return std::make_unique<SubmittedCombine>(
      std::move(endpoint),
      std::move(inputs),
      [raw, params](const group::InterruptCheck& check) { return combine(*raw, params, check); },
      params);
}

/// Adds SubmittedCombine to @p module, combine() to @p endpoint_class.
/// Operations run by combine(EndpointT&, const ops::CombineParams&, const group::InterruptCheck&).
template <typename EndpointT, typename PlanT>
void bind_combine(py::module_& module,
                  py::class_<EndpointT, std::shared_ptr<EndpointT>>& endpoint_class) {
  bind_submitted_combine(module);
  endpoint_class.def(
      "combine",
      [](std::shared_ptr<EndpointT> endpoint,
         py::handle x,
         std::shared_ptr<PlanT> plan,
         py::handle topk_weights,
         py::handle row_weights,
         py::handle out,
         const py::tuple& options,
         std::optional<int32_t> dtype,
         bool as_sums) -> py::object {
        endpoint->group().check_process("combine");
        auto params = read_combine(
            *endpoint, {x, std::move(plan), topk_weights, row_weights, out, options, dtype});
        if (!params)
          return py::none();
        if (params->is_async)
          params->caller_mark = endpoint->mark_caller();
        const bool is_summed = as_sums && !params->is_async;
        // Another thread may write for as long as an asynchronous one is under way, which counts
        // from here on.
        return counting_write(out, [&]() -> py::object {
          auto made = submit_combine(std::move(endpoint), std::move(*params), [&] {
            return py::make_tuple(x, topk_weights, row_weights, out);
          });
          return is_summed ? py::object(made->summed(out)) : py::cast(std::move(made));
        });
      });
}

}  // namespace moe::bindings
