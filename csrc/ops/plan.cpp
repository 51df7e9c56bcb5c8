#include "ops/plan.h"

#include "ops/deferred_join.h"

namespace moe::ops {

bool PlanHeader::awaits_counts() const {
  return verdict != nullptr && !verdict->has_ended();
}

PlanHeader PlanHeader::make(const layout::Arrangement& arrangement,
                            layout::CountMatrix counts,
                            AskedRows asked,
                            const layout::Placement& placement,
                            int rank_idx,
                            int64_t num_tokens,
                            int64_t num_topk) {
  PlanHeader header;
  header.arrangement = arrangement;
  header.num_tokens = num_tokens;
  header.num_topk = num_topk;
  header.num_recv_topk = counts.num_recv_topk();
  header.num_slots = layout::num_slots_per_token(arrangement.layout, num_topk, placement.num_ranks);
  header.counts = std::move(counts);
  header.received = layout::received_rows(header.counts, placement, arrangement, rank_idx);
  header.asked = std::move(asked);
  header.hash = header.counts.hash(static_cast<uint64_t>(arrangement.expert_alignment) * 3 +
                                   static_cast<uint64_t>(arrangement.layout));
  return header;
}

Plan Plan::make(const layout::Arrangement& arrangement,
                layout::CountMatrix counts,
                AskedRows asked,
                const layout::Placement& placement,
                int rank_idx,
                std::vector<int64_t> topk_idx,
                int64_t num_tokens,
                int64_t num_topk) {
  Plan plan;
  static_cast<PlanHeader&>(plan) = PlanHeader::make(
      arrangement, std::move(counts), std::move(asked), placement, rank_idx, num_tokens, num_topk);
  plan.slots.resize(static_cast<size_t>(num_tokens * plan.num_slots));
  plan.topk_idx = std::move(topk_idx);
  layout::assign_slots(plan.topk_idx.data(),
                       num_tokens,
                       num_topk,
                       plan.counts,
                       placement,
                       arrangement,
                       rank_idx,
                       plan.slots.data());
  return plan;
}

}  // namespace moe::ops
