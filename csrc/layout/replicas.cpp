#include "layout/replicas.h"

#include <algorithm>

#include "layout/replica_sharing.h"

namespace moe::layout {

Replicas::Replicas(const std::vector<int32_t>& slot_expert,
                   int num_experts,
                   int num_local_ranks_in,
                   const Placement& placement)
    : num_local_ranks(num_local_ranks_in),
      slots(placement.expert_rank, slot_expert, placement.num_ranks, num_experts) {
  for (int expert_idx = 0; expert_idx < num_experts; ++expert_idx) {
    const auto of_expert = slots.of_expert(expert_idx);
    if (of_expert.size() > 1) {
      set_of_expert.push_back(placement.num_ranks + static_cast<int32_t>(shared_experts.size()));
      shared_experts.push_back(expert_idx);
    } else {
      set_of_expert.push_back(placement.expert_rank[static_cast<size_t>(of_expert.front())]);
    }
  }
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
  std::vector<int64_t> rows_;     ///< rows of every slot
  std::vector<int32_t> logical_;  ///< [num_ranks, num_experts]
  ReplicaSharing<HostMemory> sharing_;
};

}  // namespace

void share_rows(const Replicas& replicas, const Placement& placement, CountMatrix* counts) {
  Sharing(replicas, placement, counts).run();
}

namespace {

/// One expert's choices of one rank on their way to slots, which they fill one after the other.
struct SlotRun {
  int32_t slot;
  int32_t left;       ///< rows that the slot still gets
  const int32_t* at;  ///< place of that among the expert's slots
  const int32_t* last;
};

}  // namespace

std::vector<int64_t> choose_slots(const int64_t* topk_idx,
                                  int64_t num_choices,
                                  const Replicas& replicas,
                                  const int32_t* counts) {
  std::vector<SlotRun> runs(static_cast<size_t>(replicas.num_experts()));
  for (int expert_idx = 0; expert_idx < replicas.num_experts(); ++expert_idx) {
    const auto slots = replicas.slots.of_expert(expert_idx);
    runs[static_cast<size_t>(expert_idx)] = {
        slots.front(), counts[slots.front()], slots.data(), &slots.back()};
  }
  std::vector<int64_t> chosen(static_cast<size_t>(num_choices));
  for (int64_t i = 0; i < num_choices; ++i) {
    if (topk_idx[i] < 0) {
      chosen[static_cast<size_t>(i)] = -1;
      continue;
    }
    SlotRun& run = runs[static_cast<size_t>(topk_idx[i])];
    for (; run.left == 0 && run.at != run.last; run.left = counts[run.slot])
      run.slot = *++run.at;
    --run.left;
    chosen[static_cast<size_t>(i)] = run.slot;
  }
  return chosen;
}

}  // namespace moe::layout
