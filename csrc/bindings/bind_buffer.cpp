#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bind_dispatch.h"
#include "bindings/bindings.h"
#include "bindings/shared/native_group.h"
#include "bindings/shared/tensor_view.h"
#include "bindings/submitted.h"
#include "host/combine.h"
#include "host/exchange.h"
#include "layout/workspace.h"

namespace moe::bindings {

namespace {

class SubmittedCombine : public Submitted<host::CombineOutcome> {
 public:
  SubmittedCombine(std::shared_ptr<host::Endpoint> endpoint,
                   std::shared_ptr<void> inputs,
                   const host::CombineParams& params,
                   bool is_async)
      : Submitted(
            endpoint,
            std::move(inputs),
            [raw = endpoint.get(), params] {
              return host::combine(
                  *raw,
                  params,
                  raw->is_on_progress_thread() ? host::InterruptCheck{} : signal_check());
            },
            is_async),
        params_(params) {}

  /// (sums or None, pulled weights or None); sums is None where the caller gave `out`.
  py::tuple result() {
    const host::CombineOutcome& outcome = wait();
    const int64_t num_tokens = params_.plan->num_tokens;
    py::object sums = py::none();
    py::object weights = py::none();
    if (params_.has_rows && params_.out == nullptr)
      sums = make_dlpack(
          outcome.owner, outcome.sums, {num_tokens, params_.hidden}, dlpack_type(params_.dtype));
    if (params_.row_weight_bytes > 0)
      weights = make_dlpack(outcome.owner,
                            outcome.weights,
                            {num_tokens, params_.plan->num_topk},
                            weight_type(params_.row_weight_bytes));
    return py::make_tuple(sums, weights);
  }

  bool was_copied_in() { return wait().was_copied_in; }

  py::capsule wait_ns() {
    const auto& waited_ns = wait().waited_ns;
    return vector_dlpack(waited_ns, {static_cast<int64_t>(waited_ns.size())}, kInt64);
  }

 private:
  host::CombineParams params_;
};

std::shared_ptr<host::Endpoint> create_endpoint(
    const NativeGroup& native,
    int num_experts,
    int64_t num_max_tokens,
    std::vector<int32_t> expert_rank,
    int depth,
    std::string isa,
    std::vector<std::pair<std::string, std::string>> agreed) {
  const py::gil_scoped_release no_gil;
  host::EndpointConfig config;
  config.num_experts = num_experts;
  config.num_max_tokens = num_max_tokens;
  config.expert_rank = std::move(expert_rank);
  config.depth = depth;
  config.isa = std::move(isa);
  config.agreed = std::move(agreed);
  auto endpoint = host::Endpoint::create(native.group, std::move(config), signal_check());
  auto* const address = endpoint.get();
  // The end waits for the progress thread, which may want the GIL to drop an operation's inputs.
  return std::shared_ptr<host::Endpoint>(address, [endpoint](host::Endpoint*) mutable {
    if (!Py_IsInitialized() || PyGILState_Check() == 0) {
      endpoint.reset();
      return;
    }
    const py::gil_scoped_release released;
    endpoint.reset();
  });
}

std::unique_ptr<SubmittedCombine> submit_combine(std::shared_ptr<host::Endpoint> endpoint,
                                                 py::object x,
                                                 std::shared_ptr<host::Plan> plan,
                                                 py::object topk_weights,
                                                 py::object row_weights,
                                                 py::object out,
                                                 int32_t dtype,
                                                 std::optional<bool> copy_out,
                                                 bool is_async) {
  endpoint->group().check_process("combine");
  const TensorView rows = view_tensor(x);
  const TensorView weights = view_tensor(topk_weights);
  const TensorView pulled = view_tensor(row_weights);
  host::CombineParams params;
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
  params.copy_out = copy_out_of(copy_out);
  std::shared_ptr<void> inputs;
  if (is_async || !endpoint->progress().is_idle())
    inputs = keep_alive(py::make_tuple(x, topk_weights, row_weights, out));
  return std::make_unique<SubmittedCombine>(
      std::move(endpoint), std::move(inputs), params, is_async);
}

/// Sends a row that says what is wrong with this rank's input; raises what every rank raises.
void reject(host::Endpoint& endpoint,
            const std::string& operation,
            const std::string& message,
            bool is_type_error) {
  endpoint.group().check_process(operation.c_str());
  const py::gil_scoped_release no_gil;
  const auto kind =
      operation == "combine" ? layout::Operation::kCombine : layout::Operation::kDispatch;
  endpoint.progress().wait_idle(signal_check());
  host::run_operation(endpoint, kind, signal_check(), [&](host::Exchange& exchange) -> int {
    layout::OperationArguments arguments;
    arguments.operation = static_cast<int32_t>(kind);
    exchange.reject(
        arguments,
        is_type_error ? layout::RowStatus::kInvalidType : layout::RowStatus::kInvalidArgument,
        message);
  });
}

py::capsule empty_rows(host::Endpoint& endpoint,
                       const host::Plan& plan,
                       int64_t hidden,
                       int64_t row_bytes,
                       int32_t dtype) {
  std::shared_ptr<Window> window;
  {
    const py::gil_scoped_release no_gil;
    window = endpoint.group().memory().allocate(static_cast<uint64_t>(plan.num_rows() * row_bytes));
  }
  std::byte* const data = window->data();
  return make_dlpack(std::move(window), data, {plan.num_rows(), hidden}, dtype);
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

py::list take_trace(host::Endpoint& endpoint) {
  py::list records;
  for (const host::TraceRecord& record : endpoint.tracer().take())
    records.append(py::make_tuple(record.epoch,
                                  layout::operation_name(record.operation),
                                  record.phase,
                                  record.start_ns,
                                  record.end_ns,
                                  record.peer_rank));
  return records;
}

}  // namespace

void bind_buffer(py::module_& module) {
  module.def("workspace_bytes",
             &layout::Workspace::bytes,
             py::arg("num_ranks"),
             py::arg("num_experts"),
             py::arg("depth"));
  py::class_<host::Plan, std::shared_ptr<host::Plan>>(module, "Plan")
      .def_readonly("num_tokens", &host::Plan::num_tokens)
      .def_readonly("num_topk", &host::Plan::num_topk)
      .def_readonly("num_recv_topk", &host::Plan::num_recv_topk)
      .def_property_readonly(
          "expert_alignment",
          [](const host::Plan& self) { return self.arrangement.expert_alignment; })
      .def_property_readonly("layout",
                             [](const host::Plan& self) { return static_cast<int>(self.layout()); })
      .def_property_readonly("num_recv_tokens", &host::Plan::num_rows)
      .def("export", &export_plan);
  py::class_<SubmittedCombine>(module, "SubmittedCombine")
      .def("is_complete", &SubmittedCombine::is_complete)
      .def("was_copied_in", &SubmittedCombine::was_copied_in)
      .def("wait_ns", &SubmittedCombine::wait_ns)
      .def("result", &SubmittedCombine::result);
  py::class_<host::Endpoint, std::shared_ptr<host::Endpoint>> endpoint(module, "Endpoint");
  bind_dispatch(module, endpoint);
  endpoint.def_static("create", &create_endpoint)
      .def("combine", &submit_combine)
      .def("reject", &reject)
      .def("empty_rows", &empty_rows)
      .def("weighted_gradient", &weighted_gradient)
      .def("import_plan", &import_plan)
      .def_property_readonly("isa", [](const host::Endpoint& self) { return self.kernels().name; })
      .def_property_readonly("buffer_number", &host::Endpoint::buffer_number)
      .def("enable_trace", [](host::Endpoint& self) { self.tracer().enable(); })
      .def("take_trace", &take_trace)
      .def(
          "destroy",
          [](host::Endpoint& self) { self.destroy(signal_check()); },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace moe::bindings
