#pragma once

#include <memory>
#include <utility>

#include "bindings/shared/count_writes.h"
#include "bindings/shared/kept_results.h"
#include "bindings/shared/plain_call.h"
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
  /// @param out  What the caller gave for the sums, or None
  py::tuple summed(py::handle out) {
    return py::make_tuple(out.is_none() ? sums() : py::reinterpret_borrow<py::object>(out),
                          wait().gradients);
  }

  bool was_copied_in() { return wait().was_copied_in; }

  py::object wait_ns() {
    const auto& waited_ns = wait().waited_ns;
    return vector_tensor(waited_ns, {static_cast<int64_t>(waited_ns.size())}, kInt64);
  }

 private:
  py::object sums() {
    const ops::CombineOutcome& outcome = wait();
    const TensorForm form({params_.plan->num_tokens, params_.hidden}, dlpack_type(params_.dtype));
    // Sums that were copied out of the window lie elsewhere.
    if (params_.window != nullptr && outcome.owner == params_.window)
      return kept_results_of(*endpoint())
          ->sums.tensor(params_.window, outcome.sums, form, device());
    return make_tensor(outcome.owner, outcome.sums, form, device());
  }

  ops::CombineParams params_;
};

/// Adds SubmittedCombine to @p module, known to no other.
void bind_submitted_combine(py::module_& module);

/// @param values  a CombineOptions of moe_comm/ep/config.py
void read_options(const py::tuple& values, ops::CombineParams* params);

/// Sums of low-latency rows have the size of those before.
void take_sums_window(ops::EndpointBase& endpoint, ops::CombineParams* params);

/// @param tensors  tensors() are those of the call, as a tuple.
template <typename EndpointT, typename MakeTuple>
std::unique_ptr<SubmittedCombine> submit_combine(std::shared_ptr<EndpointT> endpoint,
                                                 ops::CombineParams params,
                                                 const MakeTuple& tensors) {
  take_sums_window(*endpoint, &params);
  std::shared_ptr<void> inputs = keep_inputs(*endpoint, params.is_async, tensors);
  auto* const raw = endpoint.get();
  return std::make_unique<SubmittedCombine>(
      std::move(endpoint),
      std::move(inputs),
      [raw, params](const group::InterruptCheck& check) { return combine(*raw, params, check); },
      params);
}

/// Adds SubmittedCombine to @p module, combine() and combine_plain() to @p endpoint_class.
/// Operations run by combine(EndpointT&, const ops::CombineParams&, const group::InterruptCheck&).
template <typename EndpointT, typename PlanT>
void bind_combine(py::module_& module,
                  py::class_<EndpointT, std::shared_ptr<EndpointT>>& endpoint_class) {
  bind_submitted_combine(module);
  endpoint_class.def("combine",
                     [](std::shared_ptr<EndpointT> endpoint,
                        py::object x,
                        std::shared_ptr<PlanT> plan,
                        py::object topk_weights,
                        py::object row_weights,
                        py::object out,
                        int32_t dtype,
                        const py::tuple& options) {
                       endpoint->group().check_process("combine");
                       const TensorView rows = view_tensor(x);
                       const TensorView weights = view_tensor(topk_weights);
                       const TensorView pulled = view_tensor(row_weights);
                       ops::CombineParams params;
                       params.x = rows.data;
                       params.has_rows = !x.is_none();
                       params.dtype = static_cast<DType>(dtype);
                       params.hidden = rows.row_elements;
                       params.weights = weights.data;
                       params.weight_bytes = static_cast<int32_t>(weights.element_bytes);
                       params.row_weights = pulled.data;
                       params.row_weight_bytes = static_cast<int32_t>(pulled.element_bytes);
                       params.out = view_tensor(out).data;
                       params.plan = std::move(plan);
                       read_options(options, &params);
                       if (params.is_async)
                         params.caller_mark = endpoint->mark_caller();
                       // Another thread may write for as long as an asynchronous one is under way,
                       // which counts from here on.
                       return counting_write(out, [&] {
                         return submit_combine(std::move(endpoint), params, [&] {
                           return py::make_tuple(x, topk_weights, row_weights, out);
                         });
                       });
                     });
  endpoint_class.def("combine_plain",
                     [](std::shared_ptr<EndpointT> endpoint,
                        py::handle x,
                        std::shared_ptr<PlanT> plan,
                        py::handle topk_weights,
                        py::handle out,
                        int32_t gradients) -> py::object {
                       endpoint->group().check_process("combine");
                       const auto plain =
                           view_plain_combine(*endpoint, *plan, x, topk_weights, out);
                       if (!plain)
                         return py::none();
                       ops::CombineParams params;
                       params.x = plain->rows.data;
                       params.has_rows = true;
                       params.dtype = plain->dtype;
                       params.hidden = plain->rows.row_elements;
                       params.weights = plain->weights.data;
                       params.weight_bytes = static_cast<int32_t>(plain->weights.element_bytes);
                       params.out = plain->out.data;
                       params.plan = std::move(plan);
                       params.gradients = gradients;
                       return counting_write(out, [&] {
                         const auto tensors = [&] { return py::make_tuple(x, topk_weights, out); };
                         return submit_combine(std::move(endpoint), params, tensors)->summed(out);
                       });
                     });
}

}  // namespace moe::bindings
