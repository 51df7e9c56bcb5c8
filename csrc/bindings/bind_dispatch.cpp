#include <utility>

#include "bindings/bind_dispatch.h"
#include "bindings/shared/tensor_view.h"
#include "bindings/submitted.h"

namespace moe::bindings {

namespace {

/// A dispatch as Python holds it. The window of a low-latency dispatch is known before its rows
/// are, so its tensors can be had at once.
class SubmittedDispatch : public Submitted<host::DispatchOutcome> {
 public:
  SubmittedDispatch(std::shared_ptr<host::Endpoint> endpoint,
                    std::shared_ptr<void> inputs,
                    host::DispatchParams params,
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
        weight_bytes_(params.weight_bytes),
        num_scales_(params.num_scales),
        is_bytes_(params.is_quantized_here || params.dtype >= kFirstOpaqueType),
        window_(params.window) {
    if (!window_)
      return;
    window_layout_ = host::low_latency_window(*this->endpoint(), params);
    num_window_rows_ = host::num_low_latency_rows(*this->endpoint());
  }

  std::shared_ptr<host::Plan> plan() { return std::const_pointer_cast<host::Plan>(wait().plan); }

  /// `[M, hidden]`, or bytes `[M, row_bytes]` where DLPack cannot name the dtype.
  py::object x() {
    if (window_)
      return rows_dlpack(window_, window_->data(), num_window_rows_);
    const host::DispatchOutcome& outcome = wait();
    return rows_dlpack(outcome.owner, outcome.rows, outcome.plan->num_rows());
  }

  /// Scale factors as they lie in memory, `[elements]` of an integer type of their size, or None.
  py::object x_sf() {
    if (num_scales_ == 0)
      return py::none();
    if (window_)
      return scales_dlpack(window_,
                           window_->data() + window_layout_.scales_offset,
                           window_layout_.scales,
                           num_window_rows_);
    const host::DispatchOutcome& outcome = wait();
    return scales_dlpack(
        outcome.owner, outcome.scales, outcome.scale_map, outcome.plan->num_rows());
  }

  py::object topk_idx() {
    const host::DispatchOutcome& outcome = wait();
    if (!outcome.has_topk_idx)
      return py::none();
    return make_dlpack(outcome.owner,
                       outcome.topk_idx,
                       {outcome.plan->num_rows(), outcome.plan->num_recv_topk},
                       kInt64);
  }

  py::object topk_weights() {
    if (weight_bytes_ == 0)
      return py::none();
    const int32_t type = weight_type(weight_bytes_);
    if (window_)
      return make_dlpack(
          window_, window_->data() + window_layout_.weights_offset, {num_window_rows_}, type);
    const host::DispatchOutcome& outcome = wait();
    const int64_t num_rows = outcome.plan->num_rows();
    if (outcome.plan->arrangement.is_by_rank())
      return make_dlpack(
          outcome.owner, outcome.weights, {num_rows, outcome.plan->num_recv_topk}, type);
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

  py::object num_dropped_per_expert() {
    const auto& dropped = wait().num_dropped_per_expert;
    return vector_dlpack(dropped, {static_cast<int64_t>(dropped.size())}, kInt64);
  }

  int64_t num_required_rows() { return wait().num_required_rows; }

  py::object wait_ns() {
    const auto& waited_ns = wait().waited_ns;
    return vector_dlpack(waited_ns, {static_cast<int64_t>(waited_ns.size())}, kInt64);
  }

 private:
  /// Rows of a dtype that DLPack cannot name are handed out as bytes.
  py::capsule rows_dlpack(std::shared_ptr<void> owner, std::byte* rows, int64_t num_rows) const {
    if (is_bytes_)
      return make_dlpack(
          std::move(owner), rows, {num_rows, row_bytes_}, dlpack_type(DType::kBytes));
    return make_dlpack(std::move(owner), rows, {num_rows, hidden_}, dtype_);
  }

  py::capsule scales_dlpack(std::shared_ptr<void> owner,
                            std::byte* scales,
                            const layout::ScaleMap& map,
                            int64_t num_rows) const {
    const auto bits = static_cast<int32_t>(map.scale_bytes * 8);
    const int32_t type = bits == 8 ? dlpack_type(DType::kBytes) : bits;
    return make_dlpack(std::move(owner), scales, {map.bytes(num_rows) / map.scale_bytes}, type);
  }

  int64_t hidden_;
  int64_t row_bytes_;
  int32_t dtype_;
  int32_t weight_bytes_;
  int64_t num_scales_;
  bool is_bytes_;
  std::shared_ptr<Window> window_;
  layout::ReceiveWindow window_layout_;
  int64_t num_window_rows_ = 0;
};

/// The scale factors of a call, as Python describes them.
struct ScaleArguments {
  int32_t code;  ///< see DispatchParams::quantization_code
  int32_t block;
  int32_t scale_format;
  int32_t source_dtype;
  int64_t num_scales;
  int32_t scale_bytes;
  int64_t row_stride;  ///< bytes, of rows that are quantised already
  int64_t step;
};

ScaleArguments scale_arguments_of(const py::tuple& values) {
  return {values[0].cast<int32_t>(),
          values[1].cast<int32_t>(),
          values[2].cast<int32_t>(),
          values[3].cast<int32_t>(),
          values[4].cast<int64_t>(),
          values[5].cast<int32_t>(),
          values[6].cast<int64_t>(),
          values[7].cast<int64_t>()};
}

void describe_scales(const ScaleArguments& scales,
                     const TensorView& rows,
                     const TensorView& given,
                     host::DispatchParams* params) {
  params->quantization_code = scales.code;
  params->num_scales = scales.num_scales;
  params->scale_bytes = scales.scale_bytes;
  params->is_quantized_here = given.data == nullptr && scales.block > 0;
  if (params->is_quantized_here) {
    params->row_bytes = rows.row_elements;
    params->row_quantization.dtype = static_cast<DType>(scales.source_dtype);
    params->row_quantization.block = scales.block;
    params->row_quantization.scale_format = static_cast<host::ScaleFormat>(scales.scale_format);
    params->row_quantization.hidden = rows.row_elements;
    return;
  }
  params->scales = given.data;
  params->scale_row_stride = scales.row_stride;
  params->scale_step = scales.step;
}

std::unique_ptr<SubmittedDispatch> submit_dispatch(std::shared_ptr<host::Endpoint> endpoint,
                                                   py::object x,
                                                   py::object x_sf,
                                                   py::object topk_idx,
                                                   py::object topk_weights,
                                                   std::shared_ptr<host::Plan> plan,
                                                   int32_t dtype,
                                                   int layout,
                                                   int64_t expert_alignment,
                                                   std::optional<py::tuple> scales,
                                                   std::optional<py::tuple> capacity,
                                                   std::vector<int> masked_ranks,
                                                   std::optional<bool> copy_out,
                                                   bool is_async) {
  endpoint->group().check_process("dispatch");
  const TensorView rows = view_tensor(x);
  const TensorView choices = view_tensor(topk_idx);
  const TensorView weights = view_tensor(topk_weights);
  host::DispatchParams params;
  params.x = rows.data;
  params.topk_idx = reinterpret_cast<const int64_t*>(choices.data);
  params.weights = weights.data;
  params.num_tokens = rows.num_rows;
  params.num_topk = choices.row_elements;
  params.source_row_bytes = rows.row_bytes();
  params.row_bytes = rows.row_bytes();
  params.weight_bytes = static_cast<int32_t>(weights.element_bytes);
  params.dtype = dtype;
  params.layout = static_cast<layout::RowLayout>(layout);
  params.expert_alignment = expert_alignment;
  if (scales)
    describe_scales(scale_arguments_of(*scales), rows, view_tensor(x_sf), &params);
  if (capacity) {
    params.fixed_rows = (*capacity)[0].cast<int64_t>();
    params.capacity.expert_capacity = (*capacity)[1].cast<int64_t>();
    params.capacity.on_overflow = static_cast<layout::OnOverflow>((*capacity)[2].cast<int>());
  }
  params.masked_ranks = std::move(masked_ranks);
  params.plan = std::move(plan);
  params.copy_out = copy_out_of(copy_out);
  const bool is_low_latency =
      (params.plan ? params.plan->layout() : params.layout) == layout::RowLayout::kLowLatency;
  if (is_low_latency) {
    try {
      params.window = endpoint->group().memory().allocate(
          static_cast<uint64_t>(host::low_latency_window(*endpoint, params).bytes));
    } catch (const CapacityError&) {
      // The operation finds the same, and tells the peers.
    }
  }
  std::shared_ptr<void> inputs;
  if (is_async || !endpoint->progress().is_idle())
    inputs = keep_alive(py::make_tuple(x, x_sf, topk_idx, topk_weights));
  return std::make_unique<SubmittedDispatch>(
      std::move(endpoint), std::move(inputs), std::move(params), rows.row_elements, is_async);
}

}  // namespace

void bind_dispatch(py::module_& module,
                   py::class_<host::Endpoint, std::shared_ptr<host::Endpoint>>& endpoint) {
  py::class_<SubmittedDispatch>(module, "SubmittedDispatch")
      .def("is_complete", &SubmittedDispatch::is_complete)
      .def("plan", &SubmittedDispatch::plan)
      .def("x", &SubmittedDispatch::x)
      .def("x_sf", &SubmittedDispatch::x_sf)
      .def("topk_idx", &SubmittedDispatch::topk_idx)
      .def("topk_weights", &SubmittedDispatch::topk_weights)
      .def("num_tokens_per_expert", &SubmittedDispatch::num_tokens_per_expert)
      .def("num_dropped_per_expert", &SubmittedDispatch::num_dropped_per_expert)
      .def("num_required_rows", &SubmittedDispatch::num_required_rows)
      .def("wait_ns", &SubmittedDispatch::wait_ns)
      .def("expert_offsets", &SubmittedDispatch::expert_offsets);
  endpoint.def("dispatch", &submit_dispatch);
}

}  // namespace moe::bindings
