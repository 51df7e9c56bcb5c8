#include "host/plan.h"

namespace moe::host {

Plan Plan::make(const layout::Arrangement& arrangement,
                layout::CountMatrix counts,
                const layout::Placement& placement,
                int rank_idx,
                const int64_t* topk_idx,
                int64_t num_tokens,
                int64_t num_topk) {
  Plan plan;
  plan.arrangement = arrangement;
  plan.num_tokens = num_tokens;
  plan.num_topk = num_topk;
  plan.num_recv_topk = counts.num_recv_topk();
  plan.num_slots = layout::num_slots_per_token(arrangement.layout, num_topk, placement.num_ranks);
  plan.counts = std::move(counts);
  plan.slots.resize(static_cast<size_t>(num_tokens * plan.num_slots));
  plan.topk_idx.assign(topk_idx, topk_idx + num_tokens * num_topk);
  layout::assign_slots(topk_idx,
                       num_tokens,
                       num_topk,
                       plan.counts,
                       placement,
                       arrangement,
                       rank_idx,
                       plan.slots.data());
  plan.received = layout::received_rows(plan.counts, placement, arrangement, rank_idx);
  plan.hash = plan.counts.hash(static_cast<uint64_t>(arrangement.expert_alignment) * 3 +
                               static_cast<uint64_t>(arrangement.layout));
  return plan;
}

}  // namespace moe::host
