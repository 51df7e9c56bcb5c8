#include "layout/replicas.h"

#include <algorithm>

#include "layout/replica_sharing.h"

namespace moe::layout {

Replicas::Replicas(const std::vector<int32_t>& slot_expert,
                   int num_experts,
                   int num_local_ranks_in,
                   const Placement& placement)
    : num_local_ranks(num_local_ranks_in),
      slots(placement.expert_rank, slot_expert, placement.num_ranks, num_experts) {}

int64_t count_choices(const int64_t* topk_idx,
                      int64_t num_tokens,
                      int64_t num_topk,
                      const Replicas* replicas,
                      const Placement& placement,
                      int32_t* counts) {
  if (replicas == nullptr)
    return count_choices(topk_idx, num_tokens, num_topk, placement, counts);
  std::fill_n(counts, placement.num_experts + placement.num_ranks, 0);
  for (int64_t i = 0; i < num_tokens * num_topk; ++i) {
    const int64_t expert_idx = topk_idx[i];
    if (expert_idx >= 0 && expert_idx < replicas->num_experts())
      ++counts[expert_idx];
    else if (expert_idx != -1)
      return i;
  }
  int32_t* const to_rank = counts + placement.num_experts;
  for (int expert_idx = 0; expert_idx < replicas->num_experts(); ++expert_idx)
    for (const int32_t slot : replicas->slots.of_expert(expert_idx)) {
      int32_t& most = to_rank[placement.expert_rank[static_cast<size_t>(slot)]];
      most =
          static_cast<int32_t>(std::min<int64_t>(num_tokens, int64_t{most} + counts[expert_idx]));
    }
  return -1;
}

namespace {

/// One matrix on its way from experts to slots.
class Sharing {
 public:
  Sharing(const Replicas& replicas, const Placement& placement, CountMatrix* counts)
      : replicas_(replicas),
        placement_(placement),
        counts_(*counts),
        num_ranks_(counts->num_ranks),
        is_masked_(static_cast<size_t>(num_ranks_)),
        rows_(static_cast<size_t>(placement.num_experts)),
        logical_(static_cast<size_t>(num_ranks_) * static_cast<size_t>(num_experts())),
        sharing_{replicas.slots.table(),
                 num_experts(),
                 placement.num_experts,
                 replicas.num_local_ranks,
                 is_masked_.data(),
                 rows_.data(),
                 logical_.data(),
                 counts_.counts.data()} {}

  void run() {
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx)
      is_masked_[static_cast<size_t>(rank_idx)] = sharing_.finds_mask(rank_idx) ? 1 : 0;
    for (int src_rank = 0; src_rank < num_ranks_; ++src_rank) {
      int32_t* const row = counts_.row(src_rank);
      std::copy_n(row, num_experts(), logical_.data() + int64_t{src_rank} * num_experts());
      std::fill_n(row, placement_.num_experts, 0);
      if (is_masked_[static_cast<size_t>(src_rank)] == 0)
        for (int expert_idx = 0; expert_idx < num_experts(); ++expert_idx)
          sharing_.place_at_home(src_rank, expert_idx);
    }
    replicas_.slots.level(rows_.data(), is_masked_.data());
    for (int expert_idx = 0; expert_idx < num_experts(); ++expert_idx)
      sharing_.share(expert_idx);
    for (int src_rank = 0; src_rank < num_ranks_; ++src_rank)
      say_ranks(counts_.row(src_rank));
  }

 private:
  int num_experts() const { return replicas_.num_experts(); }

  void say_ranks(int32_t* row) const {
    int32_t* const to_rank = row + placement_.num_experts;
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx) {
      if (to_rank[rank_idx] == CountMatrix::kMasked)
        continue;
      to_rank[rank_idx] = 0;
      for (const int32_t slot : placement_.local_experts[static_cast<size_t>(rank_idx)])
        to_rank[rank_idx] += row[slot];
    }
  }

  const Replicas& replicas_;
  const Placement& placement_;
  CountMatrix& counts_;
  int num_ranks_;
  std::vector<uint8_t> is_masked_;
  std::vector<int64_t> rows_;     ///< of every slot
  std::vector<int32_t> logical_;  ///< [num_ranks, num_experts]
  ReplicaSharing<HostMemory> sharing_;
};

}  // namespace

void share_rows(const Replicas& replicas, const Placement& placement, CountMatrix* counts) {
  Sharing(replicas, placement, counts).run();
}

namespace {

/// One rank's choices on their way to slots: those of an expert fill its slots one after the other.
class SlotRuns {
 public:
  /// @param counts  What share_rows() made of this rank's counts.
  SlotRuns(const Replicas& replicas, const int32_t* counts)
      : slots_(replicas.slots),
        counts_(counts),
        left_(static_cast<size_t>(replicas.num_experts())),
        run_(left_.size()) {
    for (size_t e = 0; e < left_.size(); ++e)
      left_[e] = counts_[of_expert(e).front()];
  }

  int32_t take(int64_t expert_idx) {
    const auto e = static_cast<size_t>(expert_idx);
    if (left_[e] == 0)
      go_on(e);
    --left_[e];
    return of_expert(e)[run_[e]];
  }

  /// Returns whether as many were taken as there are rows.
  bool is_used_up() {
    for (size_t e = 0; e < left_.size(); ++e) {
      if (left_[e] == 0)
        go_on(e);
      if (left_[e] != 0)
        return false;
    }
    return true;
  }

 private:
  std::span<const int32_t> of_expert(size_t e) const {
    return slots_.of_expert(static_cast<int>(e));
  }
  void go_on(size_t e) {
    const auto slots = of_expert(e);
    while (left_[e] == 0 && run_[e] + 1 < slots.size())
      left_[e] = counts_[slots[++run_[e]]];
  }

  const ReplicaSlots& slots_;
  const int32_t* counts_;
  std::vector<int32_t> left_;  ///< by expert, in the slot of the run
  std::vector<size_t> run_;
};

}  // namespace

std::vector<int64_t> choose_slots(const int64_t* topk_idx,
                                  int64_t num_choices,
                                  const Replicas& replicas,
                                  const int32_t* counts) {
  SlotRuns runs(replicas, counts);
  std::vector<int64_t> chosen(static_cast<size_t>(num_choices));
  for (int64_t i = 0; i < num_choices; ++i)
    chosen[static_cast<size_t>(i)] = topk_idx[i] < 0 ? -1 : runs.take(topk_idx[i]);
  return chosen;
}

bool count_tokens(const int64_t* topk_idx,
                  int64_t num_tokens,
                  int64_t num_topk,
                  const Replicas& replicas,
                  const Placement& placement,
                  int32_t* counts) {
  SlotRuns runs(replicas, counts);
  int32_t* const to_rank = counts + placement.num_experts;
  std::fill_n(to_rank, placement.num_ranks, 0);
  std::vector<int64_t> last_token(static_cast<size_t>(placement.num_ranks), -1);
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx)
    for (int64_t k = 0; k < num_topk; ++k) {
      const int64_t expert_idx = *topk_idx++;
      if (expert_idx < 0 || expert_idx >= replicas.num_experts()) {
        if (expert_idx == -1)
          continue;
        return false;
      }
      const int32_t dst_rank = placement.expert_rank[static_cast<size_t>(runs.take(expert_idx))];
      int64_t& last = last_token[static_cast<size_t>(dst_rank)];
      to_rank[dst_rank] += last != token_idx;
      last = token_idx;
    }
  return runs.is_used_up();
}

}  // namespace moe::layout
