#include "runtime/dispatch_launches.h"

#include <algorithm>

#include "layout/token_sets.h"
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
  made_plan_ = DevicePlan::allocate(endpoint_,
                                    arrangement_.layout,
                                    params_.num_tokens,
                                    params_.num_topk,
                                    contents_,
                                    num_fixed_rows());
  tables_ =
      DispatchTables::allocate(endpoint_, made_plan_->device_counts, contents_, num_fixed_rows());
  slots_ = made_plan_->slots;
  choices_ = shape_choices();
  choices_.asked_idx = params_.topk_idx;
  choices_.topk_idx = made_plan_->topk_idx;
  cut_chunks(endpoint_, &choices_);
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
  const auto num_local = static_cast<size_t>(endpoint_.num_local_experts());
  plan.received.num_tokens_per_expert.resize(num_local);
  plan.received.expert_offsets.resize(num_local + 1);
}

void DispatchLaunches::cut_chunks(const DeviceEndpoint& endpoint, kernels::Choices* choices) {
  const int64_t num_tokens = choices->num_tokens;
  choices->tokens_per_chunk = static_cast<int32_t>(
      std::max<int64_t>(endpoint.tokens_per_chunk(), (num_tokens + kMostChunks - 1) / kMostChunks));
  choices->num_chunks = static_cast<int32_t>((num_tokens + choices->tokens_per_chunk - 1) /
                                             choices->tokens_per_chunk);
}

int64_t DispatchLaunches::scratch_bytes(const DeviceEndpoint& endpoint,
                                        int64_t num_tokens,
                                        int64_t num_topk) {
  kernels::Choices choices;
  choices.num_tokens = num_tokens;
  choices.num_topk = choices.num_slots = static_cast<int32_t>(num_topk);  // no layout has more
  cut_chunks(endpoint, &choices);
  kernels::TokenSets sets = endpoint.reserved_sets();
  return lay_chunks(nullptr, endpoint, &choices, &sets);
}

int64_t DispatchLaunches::lay_chunks(std::byte* memory,
                                     const DeviceEndpoint& endpoint,
                                     kernels::Choices* choices,
                                     kernels::TokenSets* sets) {
  const int num_totals = endpoint.config().num_experts + endpoint.num_ranks();
  Suballocator suballocator(memory);
  choices->chunk_counts = suballocator.take<int32_t>(int64_t{choices->num_chunks} * num_totals);
  choices->place_in_chunk = suballocator.take<int32_t>(
      choices->num_tokens * (sets->base == nullptr ? choices->num_slots : choices->num_topk));
  choices->bad_choice = suballocator.take<int64_t>(choices->num_chunks);
  if (sets->base != nullptr) {
    const int64_t num_words =
        2 * layout::TokenSetMap::words_of(choices->num_tokens) * endpoint.num_ranks();
    sets->bound_tokens = suballocator.take<uint32_t>(num_words);
    sets->bound_before = suballocator.take<int32_t>(num_words);
  }
  return suballocator.bytes();
}

void DispatchLaunches::take_plan(const DevicePlan& plan) {
  tables_ = DispatchTables::allocate(endpoint_, nullptr, contents_, plan.num_rows());
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
  const Internode* const internode = endpoint_.internode();
  if (internode == nullptr)
    return "";
  return internode->find_shortage(
      internode->kernels().dispatch_bytes(kernel_params(), internode->rails()),
      params_.num_tokens,
      params_.row_bytes + params_.num_scales * params_.scale_bytes);
}

kernels::DispatchParams DispatchLaunches::kernel_params() const {
  kernels::DispatchParams params;
  params.buffer = endpoint_.buffer();
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
  params.is_plain = endpoint_.needs_plain_copies(params_.x) ? 1 : 0;
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
  if (const Internode* const internode = endpoint_.internode()) {
    const InternodeKernels& kernels = internode->kernels();
    device::Launch launch = endpoint_.launch(endpoint_.num_sms());
    fit_shared_memory(endpoint_.device(), launch, [&](int num_threads) {
      return kernels.dispatch_shared_bytes(params, internode->rails(), num_threads);
    });
    kernels.dispatch(launch, params, internode->rails());
    return;
  }
  device::Launch launch = endpoint_.launch_behind(endpoint_.num_sms());
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
