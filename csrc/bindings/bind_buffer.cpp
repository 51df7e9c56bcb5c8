#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/bind_endpoint.h"
#include "host/exchange.h"
#include "layout/workspace.h"

namespace moe::bindings {

namespace {

std::shared_ptr<host::Endpoint> create_endpoint(
    const NativeGroup& native,
    int num_experts,
    int64_t num_max_tokens,
    std::vector<int32_t> expert_rank,
    int depth,
    std::string isa,
    std::vector<std::pair<std::string, std::string>> agreed) {
  const py::gil_scoped_release no_gil;
  return drop_without_gil(host::Endpoint::create(native.group,
                                                 endpoint_config_of(num_experts,
                                                                    num_max_tokens,
                                                                    std::move(expert_rank),
                                                                    depth,
                                                                    std::move(isa),
                                                                    std::move(agreed)),
                                                 signal_check()));
}

void weighted_gradient(host::Endpoint& endpoint,
                       py::handle gradient,
                       py::handle expert_out,
                       py::handle weights,
                       py::handle dots,
                       int32_t dtype) {
  const TensorView rows = view_tensor(gradient);
  const TensorView values = view_tensor(expert_out);
  const TensorView factors = view_tensor(weights);
  const TensorView products = view_tensor(dots);
  const bool is_wide = factors.element_bytes == 8;
  const py::gil_scoped_release no_gil;
  endpoint.for_tokens(rows.num_rows, 3 * rows.bytes(), [&](int64_t begin, int64_t end) {
    const host::FloatingPointScope scope;
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

py::tuple export_plan(const host::Plan& plan) {
  const int64_t num_ranks = plan.counts.num_ranks;
  return py::make_tuple(
      vector_dlpack(plan.counts.counts, {num_ranks, plan.counts.stride()}, kInt32),
      vector_dlpack(plan.slots, {plan.num_tokens, plan.num_slots}, kInt64),
      vector_dlpack(plan.topk_idx, {plan.num_tokens, plan.num_topk}, kInt64));
}

std::shared_ptr<host::Plan> import_plan(const host::Endpoint& endpoint,
                                        py::handle counts,
                                        py::handle topk_idx,
                                        int layout,
                                        int64_t expert_alignment) {
  const TensorView matrix = view_tensor(counts);
  const TensorView choices = view_tensor(topk_idx);
  const py::gil_scoped_release no_gil;
  layout::CountMatrix copied(endpoint.num_ranks(), endpoint.config().num_experts);
  MOE_CHECK(matrix.num_rows == copied.num_ranks && matrix.row_elements == copied.stride() &&
                matrix.element_bytes == 4,
            "counts must be int32 [",
            copied.num_ranks,
            ", ",
            copied.stride(),
            "], got [",
            matrix.num_rows,
            ", ",
            matrix.row_elements,
            "]");
  const auto* source = reinterpret_cast<const int32_t*>(matrix.data);
  std::copy_n(source, copied.counts.size(), copied.counts.data());
  const auto* ids = reinterpret_cast<const int64_t*>(choices.data);
  std::vector<int32_t> asked(static_cast<size_t>(copied.stride()));
  const int64_t bad_idx = layout::count_choices(
      ids, choices.num_rows, choices.row_elements, endpoint.placement(), asked.data());
  const int32_t* const kept = copied.row(endpoint.rank_idx());
  bool fits = bad_idx < 0 && copied.num_topk(endpoint.rank_idx()) == choices.row_elements;
  for (int expert_idx = 0; expert_idx < copied.num_experts; ++expert_idx)
    fits = fits && kept[expert_idx] >= 0 && kept[expert_idx] <= asked[expert_idx];
  MOE_CHECK(fits, "topk_idx and counts of a handle belong to different dispatches");
  const auto arrangement =
      host::arrangement_of(endpoint, static_cast<layout::RowLayout>(layout), expert_alignment);
  return std::make_shared<host::Plan>(host::Plan::make(arrangement,
                                                       std::move(copied),
                                                       endpoint.placement(),
                                                       endpoint.rank_idx(),
                                                       ids,
                                                       choices.num_rows,
                                                       choices.row_elements));
}

}  // namespace

void bind_buffer(py::module_& module) {
  module.def("workspace_bytes",
             &layout::Workspace::bytes,
             py::arg("num_ranks"),
             py::arg("num_experts"),
             py::arg("depth"));
  bind_plan<host::Plan>(module).def("export", &export_plan);
  py::class_<host::Endpoint, std::shared_ptr<host::Endpoint>> endpoint(module, "Endpoint");
  bind_endpoint<host::Endpoint, host::Plan>(module, endpoint);
  endpoint.def_static("create", &create_endpoint)
      .def("weighted_gradient", &weighted_gradient)
      .def("import_plan", &import_plan)
      .def_property_readonly("isa", [](const host::Endpoint& self) { return self.kernels().name; });
}

}  // namespace moe::bindings
