#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/bind_endpoint.h"
#include "bindings/shared/count_writes.h"
#include "bindings/shared/signature.h"
#include "ops/exchange.h"

namespace moe::bindings {

namespace {

std::shared_ptr<ops::Endpoint> create_endpoint(py::handle settings,
                                               std::string isa,
                                               std::shared_ptr<Rail> rail,
                                               bool checks_messages) {
  const auto native = native_group_of(settings);
  ops::EndpointConfig config = endpoint_config_of(settings);
  config.isa = std::move(isa);
  config.rail = std::move(rail);
  config.checks_messages = checks_messages;
  const py::gil_scoped_release no_gil;
  return drop_without_gil(ops::Endpoint::create(native->group, std::move(config), signal_check()));
}

void weighted_gradient(ops::Endpoint& endpoint,
                       py::handle gradient,
                       py::handle expert_out,
                       py::handle weights,
                       py::handle dots,
                       int32_t dtype) {
  const TensorView rows = view_tensor(gradient);
  const TensorView values = view_tensor(expert_out);
  const TensorView factors = view_tensor(weights);
  const TensorView products = view_tensor(dots);
  count_writes(py::make_tuple(gradient, dots));
  const bool is_wide = factors.element_bytes == 8;
  const py::gil_scoped_release no_gil;
  endpoint.for_tokens(rows.num_rows, 3 * rows.bytes(), [&](int64_t begin, int64_t end) {
    const cpu::FloatingPointScope scope;
    for (int64_t row = begin; row < end; ++row) {
      const double factor = is_wide ? reinterpret_cast<const double*>(factors.data)[row]
                                    : reinterpret_cast<const float*>(factors.data)[row];
      const double dot = endpoint.kernels().scale_and_dot(static_cast<DType>(dtype),
                                                          rows.data + row * rows.row_bytes(),
                                                          values.data + row * rows.row_bytes(),
                                                          factor,
                                                          rows.row_elements);
      if (is_wide)
        reinterpret_cast<double*>(products.data)[row] = dot;
      else
        reinterpret_cast<float*>(products.data)[row] = static_cast<float>(dot);
    }
  });
}

std::shared_ptr<ops::Plan> import_plan(ops::Endpoint& endpoint,
                                       py::handle counts,
                                       py::handle topk_idx,
                                       py::handle asked,
                                       int layout,
                                       int64_t expert_alignment,
                                       int64_t hash) {
  return std::make_shared<ops::Plan>(
      plan_of_tensors(endpoint, counts, topk_idx, asked, layout, expert_alignment, hash));
}

}  // namespace

void bind_buffer(py::module_& module) {
  bind_plan<ops::Plan>(module);
  py::class_<ops::Endpoint, std::shared_ptr<ops::Endpoint>> endpoint(module, "Endpoint");
  bind_endpoint<ops::Endpoint, ops::Plan>(module, endpoint);
  endpoint.def_static("create", &create_endpoint, Signature("settings, isa, rail, checks_messages"))
      .def("weighted_gradient", &weighted_gradient)
      .def("import_plan", &import_plan)
      .def("export_plan",
           [](const ops::Endpoint&, const ops::Plan& plan) { return plan_tensors(plan); })
      .def_property_readonly("isa", [](const ops::Endpoint& self) { return self.kernels().name; })
      .def("internode_bytes", [](const ops::Endpoint& self) {
        const auto bytes = self.internode_bytes();
        return std::make_pair(bytes.sent, bytes.received);
      });
}

}  // namespace moe::bindings
