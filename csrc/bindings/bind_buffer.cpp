#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "bindings/native_group.h"
#include "bindings/tensor_view.h"
#include "host/combine.h"
#include "host/dispatch.h"
#include "host/exchange.h"
#include "layout/workspace.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

constexpr int32_t kInt32 = 0 << 8 | 32;
constexpr int32_t kInt64 = 0 << 8 | 64;
constexpr int32_t kFirstOpaqueType = 0x100 << 8;

int32_t weight_type(int64_t weight_bytes) {
  return dlpack_type(weight_bytes == 8 ? DType::kFloat64 : DType::kFloat32);
}

host::CopyOut copy_out_of(const std::optional<bool>& copy_out) {
  if (!copy_out)
    return host::CopyOut::kAuto;
  return *copy_out ? host::CopyOut::kAlways : host::CopyOut::kNever;
}

template <typename Value>
py::capsule vector_dlpack(std::vector<Value> values,
                          std::initializer_list<int64_t> shape,
                          int32_t type) {
  auto owner = std::make_shared<std::vector<Value>>(std::move(values));
  void* const data = owner->data();
  return make_dlpack(std::move(owner), data, shape, type);
}

/// Keeps Python objects alive for an operation that a progress thread may outlive the caller in.
std::shared_ptr<void> keep_alive(py::tuple objects) {
  auto* held = new py::object(std::move(objects));
  return std::shared_ptr<void>(held, [](void* memory) {
    auto* object = static_cast<py::object*>(memory);
    if (!Py_IsInitialized()) {
      object->release();
      delete object;
      return;
    }
    const py::gil_scoped_acquire gil;
    delete object;
  });
}

/// One operation of a buffer as Python holds it. @p inputs are given where a progress thread will
/// read them: a caller interrupted by a signal may drop its own.
template <typename Outcome>
class Submitted {
 public:
  Submitted(std::shared_ptr<host::Endpoint> endpoint,
            std::shared_ptr<void> inputs,
            std::function<Outcome()> body,
            bool is_async)
      : endpoint_(std::move(endpoint)), pending_(std::make_shared<host::Pending<Outcome>>()) {
    const py::gil_scoped_release no_gil;
    if (!is_async && endpoint_->progress().is_idle()) {
      pending_->run(body);
      pending_->wait({});
      return;
    }
    endpoint_->progress().submit(
        [pending = pending_, body = std::move(body), inputs = std::move(inputs)] {
          pending->run(body);
        },
        signal_check());
    if (!is_async)
      pending_->wait(signal_check());
  }

  bool is_complete() const { return pending_->is_complete(); }

  const Outcome& wait() {
    if (pending_->is_complete())
      return pending_->wait({});
    const py::gil_scoped_release no_gil;
    return pending_->wait(signal_check());
  }

  const std::shared_ptr<host::Endpoint>& endpoint() const { return endpoint_; }

 private:
  std::shared_ptr<host::Endpoint> endpoint_;
  std::shared_ptr<host::Pending<Outcome>> pending_;
};

class SubmittedDispatch : public Submitted<host::DispatchOutcome> {
 public:
  SubmittedDispatch(std::shared_ptr<host::Endpoint> endpoint,
                    std::shared_ptr<void> inputs,
                    const host::DispatchParams& params,
                    int64_t hidden,
                    bool is_async)
      : Submitted(
            endpoint,
            std::move(inputs),
            [raw = endpoint.get(), params] {
              return host::dispatch(
                  *raw,
                  params,
                  raw->is_on_progress_thread() ? host::InterruptCheck{} : signal_check());
            },
            is_async),
        hidden_(hidden),
        row_bytes_(params.row_bytes),
        dtype_(params.dtype),
        weight_bytes_(params.weight_bytes) {}

  std::shared_ptr<host::Plan> plan() { return std::const_pointer_cast<host::Plan>(wait().plan); }

  /// `[M, hidden]`, or bytes `[M, row_bytes]` where DLPack cannot name the dtype.
  py::object x() { return rows_dlpack(wait(), wait().plan->num_rows()); }

  py::object topk_idx() {
    const host::DispatchOutcome& outcome = wait();
    if (!outcome.has_topk_idx)
      return py::none();
    return make_dlpack(outcome.owner,
                       outcome.topk_idx,
                       {outcome.plan->num_rows(), outcome.plan->num_topk},
                       kInt64);
  }

  py::object topk_weights() {
    const host::DispatchOutcome& outcome = wait();
    if (weight_bytes_ == 0)
      return py::none();
    const int64_t num_rows = outcome.plan->num_rows();
    const int32_t type = weight_type(weight_bytes_);
    if (outcome.plan->layout == layout::RowLayout::kRankMajor)
      return make_dlpack(outcome.owner, outcome.weights, {num_rows, outcome.plan->num_topk}, type);
    return make_dlpack(outcome.owner, outcome.weights, {num_rows}, type);
  }

  py::object num_tokens_per_expert() {
    const auto& counts = wait().plan->received.num_tokens_per_expert;
    return vector_dlpack(counts, {static_cast<int64_t>(counts.size())}, kInt64);
  }

  py::object expert_offsets() {
    const auto& starts = wait().plan->received.expert_offsets;
    return vector_dlpack(std::vector<int32_t>(starts.begin(), starts.end()),
                         {static_cast<int64_t>(starts.size())},
                         kInt32);
  }

 private:
  /// Rows of a dtype that DLPack cannot name are handed out as bytes.
  py::capsule rows_dlpack(const host::DispatchOutcome& outcome, int64_t num_rows) const {
    if (dtype_ >= kFirstOpaqueType)
      return make_dlpack(
          outcome.owner, outcome.rows, {num_rows, row_bytes_}, dlpack_type(DType::kBytes));
    return make_dlpack(outcome.owner, outcome.rows, {num_rows, hidden_}, dtype_);
  }

  int64_t hidden_;
  int64_t row_bytes_;
  int32_t dtype_;
  int32_t weight_bytes_;
};

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

 private:
  host::CombineParams params_;
};

std::shared_ptr<host::Endpoint> create_endpoint(
    const NativeGroup& native,
    int num_experts,
    int num_topk,
    int64_t num_max_tokens,
    int64_t row_bytes,
    std::vector<int32_t> expert_rank,
    int depth,
    std::string isa,
    std::vector<std::pair<std::string, std::string>> agreed) {
  const py::gil_scoped_release no_gil;
  host::EndpointConfig config;
  config.num_experts = num_experts;
  config.num_topk = num_topk;
  config.num_max_tokens = num_max_tokens;
  config.row_bytes = row_bytes;
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

std::unique_ptr<SubmittedDispatch> submit_dispatch(std::shared_ptr<host::Endpoint> endpoint,
                                                   py::object x,
                                                   py::object topk_idx,
                                                   py::object topk_weights,
                                                   std::shared_ptr<host::Plan> plan,
                                                   int32_t dtype,
                                                   int layout,
                                                   int64_t expert_alignment,
                                                   std::optional<bool> copy_out,
                                                   bool is_async) {
  endpoint->group().check_process("dispatch");
  const TensorView rows = view_tensor(x);
  const TensorView weights = view_tensor(topk_weights);
  host::DispatchParams params;
  params.x = rows.data;
  params.topk_idx = reinterpret_cast<const int64_t*>(view_tensor(topk_idx).data);
  params.weights = weights.data;
  params.num_tokens = rows.num_rows;
  params.row_bytes = rows.row_bytes();
  params.weight_bytes = static_cast<int32_t>(weights.element_bytes);
  params.dtype = dtype;
  params.layout = static_cast<layout::RowLayout>(layout);
  params.expert_alignment = expert_alignment;
  params.plan = std::move(plan);
  params.copy_out = copy_out_of(copy_out);
  std::shared_ptr<void> inputs;
  if (is_async || !endpoint->progress().is_idle())
    inputs = keep_alive(py::make_tuple(x, topk_idx, topk_weights));
  return std::make_unique<SubmittedDispatch>(
      std::move(endpoint), std::move(inputs), params, rows.row_elements, is_async);
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
  MOE_CHECK(choices.row_elements == endpoint.config().num_topk,
            "topk_idx must have ",
            endpoint.config().num_topk,
            " choices per token, got ",
            choices.row_elements);
  const auto* source = reinterpret_cast<const int32_t*>(matrix.data);
  std::copy_n(source, copied.counts.size(), copied.counts.data());
  const auto* ids = reinterpret_cast<const int64_t*>(choices.data);
  std::vector<int32_t> own(static_cast<size_t>(copied.stride()));
  const int64_t bad_idx = layout::count_choices(
      ids, choices.num_rows, choices.row_elements, endpoint.placement(), own.data());
  MOE_CHECK(bad_idx < 0 && std::equal(own.begin(), own.end(), copied.row(endpoint.rank_idx())),
            "topk_idx and counts of a handle belong to different dispatches");
  return std::make_shared<host::Plan>(host::Plan::make(static_cast<layout::RowLayout>(layout),
                                                       expert_alignment,
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
      .def_readonly("expert_alignment", &host::Plan::expert_alignment)
      .def_property_readonly("layout",
                             [](const host::Plan& self) { return static_cast<int>(self.layout); })
      .def_property_readonly("num_recv_tokens", &host::Plan::num_rows)
      .def("export", &export_plan);
  py::class_<SubmittedDispatch>(module, "SubmittedDispatch")
      .def("is_complete", &SubmittedDispatch::is_complete)
      .def("plan", &SubmittedDispatch::plan)
      .def("x", &SubmittedDispatch::x)
      .def("topk_idx", &SubmittedDispatch::topk_idx)
      .def("topk_weights", &SubmittedDispatch::topk_weights)
      .def("num_tokens_per_expert", &SubmittedDispatch::num_tokens_per_expert)
      .def("expert_offsets", &SubmittedDispatch::expert_offsets);
  py::class_<SubmittedCombine>(module, "SubmittedCombine")
      .def("is_complete", &SubmittedCombine::is_complete)
      .def("was_copied_in", &SubmittedCombine::was_copied_in)
      .def("result", &SubmittedCombine::result);
  py::class_<host::Endpoint, std::shared_ptr<host::Endpoint>>(module, "Endpoint")
      .def_static("create", &create_endpoint)
      .def("dispatch", &submit_dispatch)
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
