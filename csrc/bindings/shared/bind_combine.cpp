#include "bindings/shared/bind_combine.h"

#include "ops/combine_rules.h"

namespace moe::bindings {

namespace {

/// Views tensors of arguments that have passed every rule.
CombineTensors view_combine(const CombineArguments& arguments) {
  CombineTensors tensors;
  tensors.dtype = static_cast<DType>(*arguments.dtype);
  tensors.rows = view_tensor(arguments.x);
  tensors.weights = view_tensor(arguments.topk_weights);
  tensors.row_weights = view_tensor(arguments.row_weights);
  tensors.out = view_tensor(arguments.out);
  return tensors;
}

}  // namespace

std::optional<ops::CombineParams> read_combine(const ops::EndpointBase& endpoint,
                                               const CombineArguments& arguments) {
  const bool are_checked = arguments.dtype.has_value();
  const ops::CombineOptions* const options = combine_options(arguments.options, are_checked);
  if (options == nullptr || (!are_checked && !arguments.row_weights.is_none()))
    return std::nullopt;
  const auto tensors =
      are_checked
          ? view_combine(arguments)
          : see_combine(
                endpoint, *arguments.plan, arguments.x, arguments.topk_weights, arguments.out);
  if (!tensors)
    return std::nullopt;
  ops::CombineParams params;
  static_cast<ops::CombineOptions&>(params) = *options;
  params.x = tensors->rows.data;
  params.has_rows = !arguments.x.is_none();
  params.dtype = tensors->dtype;
  params.hidden = tensors->rows.row_elements;
  params.weights = tensors->weights.data;
  params.weight_bytes = static_cast<int32_t>(tensors->weights.element_bytes);
  params.row_weights = tensors->row_weights.data;
  params.row_weight_bytes = static_cast<int32_t>(tensors->row_weights.element_bytes);
  params.out = tensors->out.data;
  params.plan = arguments.plan;
  return params;
}

void bind_submitted_combine(py::module_& module) {
  py::class_<SubmittedCombine>(module, "SubmittedCombine", py::module_local())
      .def("is_complete", &SubmittedCombine::is_complete)
      .def("judge", &SubmittedCombine::judge)
      .def("wait_ns", &SubmittedCombine::wait_ns)
      .def("result", &SubmittedCombine::result);
}

}  // namespace moe::bindings
