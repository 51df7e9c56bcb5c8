#include "ops/combine_rules.h"

#include "core/math.h"

namespace moe::ops {

int64_t combined_row_bytes(const CombineParams& params) {
  return params.has_rows ? params.hidden * element_bytes(params.dtype) : 0;
}

bool adds_by_rank(const EndpointConfig& config, const CombineParams& params) {
  return config.rank_reduction && !params.plan->arrangement.is_by_rank() &&
         combined_row_bytes(params) > 0;
}

layout::OperationArguments combine_arguments(const CombineParams& params) {
  const PlanHeader& plan = *params.plan;
  layout::OperationArguments arguments = params.arguments;
  arguments.operation = static_cast<int32_t>(layout::Operation::kCombine);
  arguments.layout = static_cast<int32_t>(plan.layout());
  arguments.expert_alignment = static_cast<int32_t>(plan.arrangement.expert_alignment);
  arguments.dtype = params.has_rows ? dlpack_type(params.dtype) : 0;
  arguments.row_bytes = combined_row_bytes(params);
  // Weights that peers pull must be there on every rank; weights applied while adding concern no
  // peer but in the backward.
  arguments.weight_bytes = params.row_weight_bytes;
  arguments.gradients |= params.weight_bytes << layout::GradientWord::kWeightBytesShift;
  arguments.plan_hash = plan.hash;
  return arguments;
}

std::string find_failed_sources(const PlanHeader& plan, const group::Group& group) {
  if (plan.awaits_counts())
    return "";  // every rank that has failed since would have had it heard
  for (int rank_idx = 0; rank_idx < group.num_ranks(); ++rank_idx)
    if (!group.is_active(rank_idx) && layout::sends_rows(plan.counts, group.rank_idx(), rank_idx))
      return concat("the handle has rows on rank ", rank_idx, ", which has failed");
  return "";
}

int64_t num_row_weights(const PlanHeader& plan) {
  return plan.num_rows() * (plan.arrangement.is_by_rank() ? plan.num_recv_topk : 1);
}

SumsWindow sums_window(const CombineParams& params) {
  const PlanHeader& plan = *params.plan;
  SumsWindow window;
  if (params.out == nullptr)
    window.weights_offset = round_up(plan.num_tokens * combined_row_bytes(params), 64);
  window.bytes = window.weights_offset + plan.num_tokens * plan.num_topk * params.row_weight_bytes;
  return window;
}

void point_into_sums(const CombineParams& params, std::byte* base, CombineOutcome* outcome) {
  if (combined_row_bytes(params) > 0)
    outcome->sums = params.out != nullptr ? params.out : base;
  if (params.row_weight_bytes > 0)
    outcome->weights = base + sums_window(params).weights_offset;
}

}  // namespace moe::ops
