#include "bindings/shared/bind_combine.h"

#include "ops/combine_rules.h"

namespace moe::bindings {

void read_options(const py::tuple& values, ops::CombineParams* params) {
  enum { kCopyOut, kAsyncOp, kGradients, kNumOptions };
  const OptionTuple options(values, "combine", kNumOptions);
  params->copy_out = options.copy_out(kCopyOut);
  params->is_async = options.at(kAsyncOp).cast<bool>();
  params->gradients = options.at(kGradients).cast<int32_t>();
}

void take_sums_window(ops::EndpointBase& endpoint, ops::CombineParams* params) {
  KeptResults* const kept = kept_results_of(endpoint);
  // What may become part of a graph is not kept: it would keep the graph.
  if (kept == nullptr || params->plan->layout() != layout::RowLayout::kLowLatency ||
      !params->has_rows || params->out != nullptr || params->gradients != 0)
    return;
  const auto bytes = static_cast<uint64_t>(ops::sums_window(*params).bytes);
  if (bytes == 0)
    return;
  try {
    params->window = kept->sums.take(endpoint.memory(), bytes);
  } catch (const CapacityError&) {
    // The operation finds the same, and tells the peers.
  }
}

void bind_submitted_combine(py::module_& module) {
  py::class_<SubmittedCombine>(module, "SubmittedCombine", py::module_local())
      .def("is_complete", &SubmittedCombine::is_complete)
      .def("judge", &SubmittedCombine::judge)
      .def("was_copied_in", &SubmittedCombine::was_copied_in)
      .def("wait_ns", &SubmittedCombine::wait_ns)
      .def("result", &SubmittedCombine::result);
}

}  // namespace moe::bindings
