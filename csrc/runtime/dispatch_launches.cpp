#include "runtime/dispatch_launches.h"

#include <algorithm>

#include "ops/dispatch_rules.h"
#include "runtime/device_replicas.h"

namespace moe::runtime {

using kernels::ExchangeParams;

kernels::Choices DispatchLaunches::shape_choices() const {
  kernels::Choices choices;
  const int64_t num_topk = params_.plan ? params_.plan->num_topk : params_.num_topk;
  choices.num_tokens = params_.num_tokens;
  choices.num_topk = static_cast<int32_t>(num_topk);
  choices.num_slots = static_cast<int32_t>(
      layout::num_slots_per_token(arrangement_.layout, num_topk, endpoint_.num_ranks()));
  choices.is_by_rank = arrangement_.is_by_rank() ? 1 : 0;
  return choices;
}

void DispatchLaunches::allocate_plan() {
  const kernels::Buffer buffer = endpoint_.control().buffer();
  const TakeMemory take = taker(num_fixed_rows());
  made_plan_ =
      DevicePlan::allocate(buffer, arrangement_.layout, params_.num_tokens, params_.num_topk, take);
  tables_ = DispatchTables::allocate(
      buffer, endpoint_.control().tables(), made_plan_->device_counts, take);
  slots_ = made_plan_->slots;
  choices_ = shape_choices();
  choices_.asked_idx = params_.topk_idx;
  choices_.topk_idx = made_plan_->topk_idx;
  cut_chunks(endpoint_.launcher().tokens_per_chunk(), &choices_);
}

TakeMemory DispatchLaunches::taker(int64_t num_rows) const {
  return [this, num_rows](int64_t bytes) {
    return contents_ == Contents::kCaptured
               ? endpoint_.buffer_memory().take_captured(num_rows, bytes)
               : endpoint_.device().allocate_unset(bytes);
  };
}

int64_t DispatchLaunches::num_fixed_rows() const {
  return arrangement_.layout == layout::RowLayout::kLowLatency
             ? ops::num_low_latency_rows(endpoint_)
             : params_.fixed_rows;
}

void DispatchLaunches::foresee_plan() {
  DevicePlan& plan = *made_plan_;
  plan.arrangement = arrangement_;
  plan.num_tokens = params_.num_tokens;
  plan.num_topk = params_.num_topk;
  plan.num_recv_topk = params_.num_topk;
  plan.num_slots =
      layout::num_slots_per_token(arrangement_.layout, params_.num_topk, endpoint_.num_ranks());
  plan.received.num_rows = num_fixed_rows();
  const auto num_local = static_cast<size_t>(endpoint_.control().buffer().num_local_experts);
  plan.received.num_tokens_per_expert.resize(num_local);
  plan.received.expert_offsets.resize(num_local + 1);
}

void DispatchLaunches::take_plan(const DevicePlan& plan) {
  tables_ = DispatchTables::allocate(
      endpoint_.control().buffer(), endpoint_.control().tables(), nullptr, taker(plan.num_rows()));
  choices_ = shape_choices();
  choices_.topk_idx = plan.topk_idx;
  slots_ = plan.slots;
  kept_counts_ = plan.device_counts;
}

kernels::Replicas DispatchLaunches::replicas() const {
  return params_.replicas ? static_cast<const DeviceReplicas&>(*params_.replicas).kernels
                          : kernels::Replicas{};
}

ExchangeParams DispatchLaunches::row() const {
  ExchangeParams row;
  row.tables = tables_.tables;
  row.arguments = ops::dispatch_arguments(params_, arrangement_);
  row.num_tokens = static_cast<int32_t>(params_.num_tokens);
  row.is_dispatch = 1;
  row.rule = params_.capacity();
  row.arrangement = arrangement_;
  row.is_column_major = params_.is_column_major() ? 1 : 0;
  row.with_topk_idx = params_.with_topk_idx(arrangement_) ? 1 : 0;
  row.kept_counts = kept_counts_;
  if (params_.plan)
    return row;
  row.with_counts = 1;
  row.choices = choices_;
  row.replicas = replicas();
  row.sets = sets_;
  if (sets_.base != nullptr) {
    row.choices.is_by_rank = 0;
    row.choices.num_slots = choices_.num_topk;
  }
  row.fixed_rows = static_cast<int32_t>(params_.fixed_rows);
  row.num_topk = static_cast<int32_t>(params_.num_topk);
  return row;
}

std::string DispatchLaunches::find_shortage() const {
  const Internode* const internode = endpoint_.launcher().internode();
  if (internode == nullptr)
    return "";
  return internode->find_shortage(
      internode->kernels().dispatch_bytes(kernel_params(), internode->rails()),
      params_.num_tokens,
      params_.row_bytes + params_.num_scales * params_.scale_bytes);
}

kernels::DispatchParams DispatchLaunches::kernel_params() const {
  kernels::DispatchParams params;
  params.buffer = endpoint_.control().buffer();
  params.tables = tables_.tables;
  params.choices = choices_;
  params.replicas = replicas();
  params.sets = sets_;
  params.x = params_.x;
  params.source_row_bytes = params_.source_row_bytes;
  params.row_bytes = params_.row_bytes;
  params.weights = params_.weights;
  params.weight_bytes = params_.weight_bytes;
  params.is_cached = params_.plan ? 1 : 0;
  params.slots = slots_;
  if (params_.is_quantized_here) {
    const cpu::RowQuantization& how = params_.row_quantization;
    params.quantize = {1, how.dtype, how.block, how.least_amax, how.scale_format};
  }
  params.num_scales = static_cast<int32_t>(params_.num_scales);
  params.scale_bytes = params_.scale_bytes;
  params.scales = params_.scales;
  params.scale_row_stride = params_.scale_row_stride;
  params.scale_step = params_.scale_step;
  params.arrangement = arrangement_;
  params.with_topk_idx = params_.with_topk_idx(arrangement_) ? 1 : 0;
  // Bulk copies move units of 16 bytes.
  const bool is_aligned = reinterpret_cast<uintptr_t>(params_.x) % 16 == 0;
  params.is_plain = endpoint_.device().has_bulk_copies() && is_aligned ? 0 : 1;
  return params;
}

kernels::ReceiveParams DispatchLaunches::receive_params() const {
  kernels::ReceiveParams params;
  params.tables = tables_.tables;
  params.operation =
      params_.plan ? layout::Operation::kCachedDispatch : layout::Operation::kDispatch;
  params.arrangement = arrangement_;
  params.row_bytes = params_.row_bytes;
  params.is_plain = endpoint_.device().has_bulk_copies() ? 0 : 1;
  return params;
}

void DispatchLaunches::send_rows() const {
  kernels::DispatchParams params = kernel_params();
  const Launcher& launcher = endpoint_.launcher();
  if (const Internode* const internode = launcher.internode()) {
    const InternodeKernels& kernels = internode->kernels();
    device::Launch launch = launcher.launch(launcher.num_sms());
    fit_shared_memory(endpoint_.device(), launch, [&](int num_threads) {
      return kernels.dispatch_shared_bytes(params, internode->rails(), num_threads);
    });
    kernels.dispatch(launch, params, internode->rails());
    return;
  }
  device::Launch launch = launcher.launch_behind(launcher.num_sms());
  fit_shared_memory(endpoint_.device(), launch, [&](int num_threads) {
    return kernels::dispatch_shared_bytes(params, num_threads);
  });
  params.num_parts = kernels::num_row_parts(launch, params);
  launch.shared_bytes = kernels::dispatch_shared_bytes(params, launch.num_threads);
  if (launch.shared_bytes > endpoint_.device().max_shared_bytes()) {
    params.is_plain = 1;
    launch.shared_bytes = kernels::dispatch_shared_bytes(params, launch.num_threads);
  }
  kernels::launch_dispatch(launch, params);
}

}  // namespace moe::runtime
