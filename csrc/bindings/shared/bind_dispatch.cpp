#include "bindings/shared/bind_dispatch.h"

namespace moe::bindings {

namespace {

/// The scale factors of a call, as `describe_scales` of moe_comm/ep/backends/native_scales.py
/// describes them.
struct ScaleArguments {
  int32_t code;  ///< layout::QuantizationCode
  int32_t source_dtype;
  int64_t num_scales;  ///< here and below: of rows that are quantized already
  int32_t scale_bytes;
  int64_t row_stride;  ///< bytes
  int64_t step;
  TensorTypes types;
};

ScaleArguments scale_arguments_of(const py::tuple& values) {
  return {values[0].cast<int32_t>(),
          values[1].cast<int32_t>(),
          values[2].cast<int64_t>(),
          values[3].cast<int32_t>(),
          values[4].cast<int64_t>(),
          values[5].cast<int64_t>(),
          {values[6].cast<int32_t>(), values[7].cast<int32_t>()}};
}

TensorTypes describe_scales(const ops::EndpointBase& endpoint,
                            const py::tuple& arguments,
                            const TensorView& rows,
                            const TensorView& given,
                            ops::DispatchParams* params) {
  const ScaleArguments scales = scale_arguments_of(arguments);
  params->quantization = {scales.code};
  params->is_quantized_here = params->quantization.is_quantized_here();
  if (params->is_quantized_here) {
    const layout::WireFormat* const format = params->quantization.find_format();
    const layout::ScaleFormat scale = params->quantization.scale();
    MOE_CHECK(format != nullptr && endpoint.can_quantize(*format, scale),
              "expected a format that rows can be quantized to here, got code ",
              scales.code);
    const int64_t hidden = rows.row_elements;
    params->row_bytes = format->row_bytes(hidden);
    params->num_scales = format->num_scales(hidden, scale);
    params->scale_bytes = format->scale_bytes(scale);
    params->row_quantization =
        cpu::row_quantization(*format, scale, static_cast<DType>(scales.source_dtype), hidden);
    return scales.types;
  }
  params->num_scales = scales.num_scales;
  params->scale_bytes = scales.scale_bytes;
  params->scales = given.data;
  params->scale_row_stride = scales.row_stride;
  params->scale_step = scales.step;
  return scales.types;
}

/// Views tensors of arguments that have passed every rule.
DispatchTensors view_dispatch(const DispatchArguments& arguments) {
  DispatchTensors tensors;
  tensors.row_type = *arguments.row_type;
  tensors.rows = view_tensor(arguments.x);
  tensors.scales = view_tensor(arguments.x_sf);
  tensors.choices = view_tensor(arguments.topk_idx);
  tensors.weights = view_tensor(arguments.topk_weights);
  return tensors;
}

/// The window of a low-latency dispatch does not wait for counts.
void take_window(ops::EndpointBase& endpoint, ops::DispatchParams* params) {
  const layout::RowLayout layout = params->plan ? params->plan->layout() : params->layout;
  if (layout != layout::RowLayout::kLowLatency)
    return;
  const auto bytes = static_cast<uint64_t>(ops::low_latency_window(endpoint, *params).bytes);
  params->is_captured = endpoint.is_capturing();
  try {
    params->window = endpoint.take_window(bytes, *params->is_captured);
    if (params->window == nullptr)
      params->window = endpoint.memory().allocate(bytes);
  } catch (const CapacityError&) {
    // The operation finds the same, and tells the peers.
  }
}

}  // namespace

bool read_dispatch(ops::EndpointBase& endpoint,
                   const DispatchArguments& arguments,
                   DispatchCall* call) {
  const bool are_checked = arguments.row_type.has_value();
  const ops::DispatchOptions* const options = dispatch_options(arguments.options, are_checked);
  if (options == nullptr)
    return false;
  ops::DispatchParams& params = call->params;
  static_cast<ops::DispatchOptions&>(params) = *options;
  params.plan = arguments.plan;
  if (params.plan == nullptr)
    params.replicas = endpoint.replicas();
  const auto tensors =
      are_checked
          ? view_dispatch(arguments)
          : see_dispatch(endpoint, arguments.x, arguments.topk_idx, arguments.topk_weights, params);
  if (!tensors)
    return false;
  params.x = tensors->rows.data;
  params.topk_idx = reinterpret_cast<const int64_t*>(tensors->choices.data);
  params.weights = tensors->weights.data;
  params.num_tokens = tensors->rows.num_rows;
  params.num_topk = tensors->choices.row_elements;
  params.source_row_bytes = tensors->rows.row_bytes();
  params.row_bytes = tensors->rows.row_bytes();
  params.weight_bytes = static_cast<int32_t>(tensors->weights.element_bytes);
  params.dtype = tensors->row_type;
  call->types.rows = params.dtype >= kFirstOpaqueType ? dlpack_type(DType::kBytes) : params.dtype;
  if (arguments.scales)
    call->types =
        describe_scales(endpoint, *arguments.scales, tensors->rows, tensors->scales, &params);
  call->listed = tensors->listed;
  take_window(endpoint, &params);
  return true;
}

py::object capsule_of(std::shared_ptr<const ListedChoices> listed) {
  if (!listed)
    return py::none();
  using Held = std::shared_ptr<const ListedChoices>;
  return py::capsule(new Held(std::move(listed)),
                     [](void* held) { delete static_cast<Held*>(held); });
}

py::class_<SubmittedDispatch> bind_submitted_dispatch(py::module_& module) {
  return py::class_<SubmittedDispatch>(module, "SubmittedDispatch", py::module_local())
      .def("is_complete", &SubmittedDispatch::is_complete)
      .def("judge", &SubmittedDispatch::judge)
      .def("x", &SubmittedDispatch::x)
      .def("x_sf", &SubmittedDispatch::x_sf)
      .def("topk_idx", &SubmittedDispatch::topk_idx)
      .def("topk_weights", &SubmittedDispatch::topk_weights)
      .def("num_tokens_per_expert", &SubmittedDispatch::num_tokens_per_expert)
      .def("num_dropped_per_expert", &SubmittedDispatch::num_dropped_per_expert)
      .def("status", &SubmittedDispatch::status)
      .def("num_required_rows", &SubmittedDispatch::num_required_rows)
      .def("gradients", &SubmittedDispatch::gradients)
      .def("wait_ns", &SubmittedDispatch::wait_ns)
      .def("expert_offsets", &SubmittedDispatch::expert_offsets);
}

}  // namespace moe::bindings
