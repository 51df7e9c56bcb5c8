#include "bindings/device/bind_device_endpoint.h"

#include "bindings/shared/count_writes.h"
#include "runtime/device_combine.h"
#include "runtime/device_dispatch.h"
#include "runtime/device_exchange.h"

namespace moe::bindings {

using runtime::DeviceEndpoint;
using runtime::DevicePlan;

namespace {

py::tuple export_plan(DeviceEndpoint& endpoint, const DevicePlan& plan) {
  ops::Plan exported;
  await_verdict(plan.verdict);
  {
    const py::gil_scoped_release no_gil;
    exported = runtime::export_plan(endpoint.device(), *endpoint.order().stream(), plan);
  }
  return plan_tensors(exported);
}

std::shared_ptr<DevicePlan> import_plan(DeviceEndpoint& endpoint,
                                        py::handle counts,
                                        py::handle topk_idx,
                                        py::handle asked,
                                        int layout,
                                        int64_t expert_alignment,
                                        int64_t hash) {
  const ops::Plan plan =
      plan_of_tensors(endpoint, counts, topk_idx, asked, layout, expert_alignment, hash);
  const py::gil_scoped_release no_gil;
  return runtime::import_plan(
      endpoint.control().buffer(), endpoint.device(), *endpoint.order().stream(), plan);
}

void weighted_gradient(DeviceEndpoint& endpoint,
                       py::handle gradient,
                       py::handle expert_out,
                       py::handle weights,
                       py::handle dots,
                       int32_t dtype) {
  const TensorView rows = view_tensor(gradient);
  const TensorView factors = view_tensor(weights);
  kernels::WeightedGradientParams params;
  params.dtype = static_cast<DType>(dtype);
  params.num_rows = rows.num_rows;
  params.hidden = rows.row_elements;
  params.gradient = rows.data;
  params.values = view_tensor(expert_out).data;
  params.weights = factors.data;
  params.dots = view_tensor(dots).data;
  params.weight_bytes = static_cast<int32_t>(factors.element_bytes);
  const std::shared_ptr<void> inputs = keep_inputs(
      endpoint, false, [&] { return py::make_tuple(gradient, expert_out, weights, dots); });
  count_writes(py::make_tuple(gradient, dots));
  const py::gil_scoped_release no_gil;
  runtime::weighted_gradient(endpoint, params);
}

}  // namespace

DeviceEndpointClass bind_device_endpoint(py::module_& module) {
  bind_plan<DevicePlan>(module);
  DeviceEndpointClass endpoint(module, "Endpoint", py::module_local());
  bind_endpoint<DeviceEndpoint, DevicePlan>(module, endpoint);
  endpoint.def("weighted_gradient", &weighted_gradient)
      .def("import_plan", &import_plan)
      .def("export_plan", &export_plan)
      .def(
          "set_caller_stream",
          [](DeviceEndpoint& endpoint, uintptr_t handle) {
            const py::gil_scoped_release no_gil;
            endpoint.order().set_caller(handle, signal_check());
          },
          py::arg("handle"));
  return endpoint;
}

runtime::DeviceEndpointConfig device_config_of(py::handle settings, runtime::LaunchShape shape) {
  runtime::DeviceEndpointConfig config;
  config.common = endpoint_config_of(settings);
  config.shape = shape;
  return config;
}

std::shared_ptr<DeviceEndpoint> create_device_endpoint(py::handle settings,
                                                       std::shared_ptr<SymmetricMemory> memory,
                                                       std::shared_ptr<runtime::Device> device,
                                                       runtime::DeviceEndpointConfig config) {
  const auto native = native_group_of(settings);
  const py::gil_scoped_release no_gil;
  return drop_without_gil(DeviceEndpoint::create(
      native->group, std::move(memory), std::move(device), std::move(config), signal_check()));
}

}  // namespace moe::bindings
