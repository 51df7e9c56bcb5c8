#include "schedules/spec.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace moe::simt::checker {

using layout::OnOverflow;
using layout::RowLayout;
using layout::Slot;

DispatchSpec::DispatchSpec(const layout::Arrangement& arrangement,
                           const layout::CapacityRule& rule,
                           std::vector<int32_t> expert_rank,
                           std::vector<AskedOfRank> asked)
    : arrangement_(arrangement),
      rule_(rule),
      expert_rank_(std::move(expert_rank)),
      asked_(std::move(asked)) {
  wanted_ = all_choices();
  keep();
  if (!has_overflow())
    place_rows();
}

std::vector<int> DispatchSpec::experts_of(int rank_idx) const {
  std::vector<int> experts;
  for (int expert_idx = 0; expert_idx < num_experts(); ++expert_idx)
    if (expert_rank_[static_cast<size_t>(expert_idx)] == rank_idx)
      experts.push_back(expert_idx);
  return experts;
}

int64_t DispatchSpec::choice(const Origin& origin) const {
  const AskedOfRank& rank = asked_[static_cast<size_t>(origin.rank_idx)];
  return rank.topk_idx[static_cast<size_t>(origin.token_idx * rank.num_topk + origin.topk_pos)];
}

std::vector<std::vector<Origin>> DispatchSpec::all_choices() const {
  std::vector<std::vector<Origin>> choices(expert_rank_.size());
  for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
    const AskedOfRank& rank = asked_[static_cast<size_t>(rank_idx)];
    for (int64_t token_idx = 0; token_idx < rank.num_tokens(); ++token_idx)
      for (int64_t k = 0; k < rank.num_topk; ++k) {
        const Origin origin{rank_idx, token_idx, k};
        if (choice(origin) >= 0)
          choices[static_cast<size_t>(choice(origin))].push_back(origin);
      }
  }
  return choices;
}

/// First what touches a rank that any rank masks goes. Where rows are dropped, an expert then keeps
/// its first ones, and of these what has its padded place within the fixed rows of its rank.
void DispatchSpec::keep() {
  kept_ = wanted_;
  std::vector<uint8_t> is_masked(asked_.size());
  for (const AskedOfRank& rank : asked_)
    for (size_t i = 0; i < rank.is_masked.size(); ++i)
      is_masked[i] = is_masked[i] | rank.is_masked[i];
  for (size_t expert_idx = 0; expert_idx < kept_.size(); ++expert_idx) {
    const auto owner = static_cast<size_t>(expert_rank_[expert_idx]);
    std::erase_if(kept_[expert_idx], [&](const Origin& origin) {
      return is_masked[owner] != 0 || is_masked[static_cast<size_t>(origin.rank_idx)] != 0;
    });
  }
  if (rule_.on_overflow != OnOverflow::kDrop)
    return;
  for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
    const int64_t fixed_rows = asked_[static_cast<size_t>(rank_idx)].fixed_rows;
    int64_t start = 0;
    for (const int expert_idx : experts_of(rank_idx)) {
      auto& kept = kept_[static_cast<size_t>(expert_idx)];
      const auto keep_first = [&kept](int64_t limit) {
        if (limit < std::ssize(kept))
          kept.resize(static_cast<size_t>(std::max<int64_t>(limit, 0)));
      };
      if (rule_.expert_capacity >= 0)
        keep_first(rule_.expert_capacity);
      if (fixed_rows >= 0)
        keep_first(fixed_rows - start);
      start += padded(std::ssize(kept));
    }
  }
}

bool DispatchSpec::has_overflow() const {
  const bool is_low_latency = arrangement_.layout == RowLayout::kLowLatency;
  if (!is_low_latency && rule_.on_overflow != OnOverflow::kRaise)
    return false;
  const int64_t most = is_low_latency ? arrangement_.rows_per_expert : rule_.expert_capacity;
  for (const auto& origins : kept_)
    if (most >= 0 && std::ssize(origins) > most)
      return true;
  for (int rank_idx = 0; !is_low_latency && rank_idx < num_ranks(); ++rank_idx) {
    const int64_t fixed_rows = asked_[static_cast<size_t>(rank_idx)].fixed_rows;
    if (fixed_rows >= 0 && num_required_rows(rank_idx) > fixed_rows)
      return true;
  }
  return false;
}

int64_t DispatchSpec::padded(int64_t num_rows) const {
  if (arrangement_.layout == RowLayout::kLowLatency)
    return arrangement_.rows_per_expert;
  const int64_t beyond = num_rows % arrangement_.expert_alignment;
  return beyond == 0 ? num_rows : num_rows + arrangement_.expert_alignment - beyond;
}

/// Returns whether an expert of @p dst_rank is among the choices of a token.
bool DispatchSpec::goes_to(int src_rank, int64_t token_idx, int dst_rank) const {
  for (int64_t k = 0; k < asked_[static_cast<size_t>(src_rank)].num_topk; ++k) {
    const int64_t expert_idx = choice({src_rank, token_idx, k});
    if (expert_idx >= 0 && expert_rank_[static_cast<size_t>(expert_idx)] == dst_rank)
      return true;
  }
  return false;
}

int64_t DispatchSpec::num_tokens_between(int src_rank, int dst_rank) const {
  int64_t num_tokens = 0;
  for (int64_t i = 0; i < asked_[static_cast<size_t>(src_rank)].num_tokens(); ++i)
    num_tokens += goes_to(src_rank, i, dst_rank);
  return num_tokens;
}

/// Choices of @p src_rank that experts of @p dst_rank keep.
int64_t DispatchSpec::num_kept(int src_rank, int dst_rank) const {
  int64_t num = 0;
  for (const int expert_idx : experts_of(dst_rank))
    for (const Origin& origin : kept_[static_cast<size_t>(expert_idx)])
      num += origin.rank_idx == src_rank;
  return num;
}

int64_t DispatchSpec::num_required_rows(int rank_idx) const {
  int64_t num_rows = 0;
  if (arrangement_.is_by_rank()) {
    for (int src_rank = 0; src_rank < num_ranks(); ++src_rank)
      num_rows += num_tokens_between(src_rank, rank_idx);
    return num_rows;
  }
  for (const int expert_idx : experts_of(rank_idx))
    num_rows += padded(std::ssize(wanted_[static_cast<size_t>(expert_idx)]));
  return num_rows;
}

/// -1 where nothing fixes them.
int64_t DispatchSpec::num_fixed_rows(int rank_idx) const {
  const int64_t fixed_rows = asked_[static_cast<size_t>(rank_idx)].fixed_rows;
  if (fixed_rows < 0 || rule_.on_overflow == OnOverflow::kDrop ||
      arrangement_.layout == RowLayout::kLowLatency)
    return fixed_rows;
  return std::max(fixed_rows, num_required_rows(rank_idx));
}

/// One row for each kept choice, expert after expert, each begun at a multiple of the alignment or
/// with all its places; by rank one for each token. Behind them what is fixed beyond.
std::vector<Origin> DispatchSpec::rows_of(int rank_idx) const {
  std::vector<Origin> rows;
  if (!arrangement_.is_by_rank()) {
    for (const int expert_idx : experts_of(rank_idx)) {
      const auto& kept = kept_[static_cast<size_t>(expert_idx)];
      const int64_t end = std::ssize(rows) + padded(std::ssize(kept));
      rows.insert(rows.end(), kept.begin(), kept.end());
      rows.resize(static_cast<size_t>(end));
    }
  } else {
    for (int src_rank = 0; src_rank < num_ranks(); ++src_rank) {
      const int64_t num_tokens = asked_[static_cast<size_t>(src_rank)].num_tokens();
      for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx)
        if (goes_to(src_rank, token_idx, rank_idx))
          rows.push_back({src_rank, token_idx});
    }
  }
  const int64_t fixed_rows = num_fixed_rows(rank_idx);
  if (fixed_rows >= 0 && arrangement_.layout != RowLayout::kLowLatency)
    rows.resize(static_cast<size_t>(fixed_rows));
  return rows;
}

void DispatchSpec::place_rows() {
  for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
    rows_.push_back(rows_of(rank_idx));
    terms_.emplace_back(static_cast<size_t>(asked_[static_cast<size_t>(rank_idx)].num_tokens()));
  }
  for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx)
    for (int64_t row_idx = 0; row_idx < std::ssize(rows(rank_idx)); ++row_idx) {
      const Origin& origin = rows(rank_idx)[static_cast<size_t>(row_idx)];
      if (!origin.is_nothing())
        terms_[static_cast<size_t>(origin.rank_idx)][static_cast<size_t>(origin.token_idx)]
            .push_back({rank_idx, row_idx, origin.topk_pos});
    }
  const auto by_choice = [](const Term& one, const Term& other) {
    return one.topk_pos < other.topk_pos;
  };
  for (auto& of_rank : terms_)
    for (auto& of_token : of_rank)
      if (!arrangement_.is_by_rank())
        std::sort(of_token.begin(), of_token.end(), by_choice);
}

layout::ReceivedRows DispatchSpec::received(int rank_idx) const {
  layout::ReceivedRows received;
  received.expert_offsets.push_back(0);
  for (const int expert_idx : experts_of(rank_idx)) {
    const int64_t num_tokens = std::ssize(kept_[static_cast<size_t>(expert_idx)]);
    received.num_tokens_per_expert.push_back(num_tokens);
    received.expert_offsets.push_back(received.expert_offsets.back() + padded(num_tokens));
  }
  received.num_rows = has_overflow() ? received.expert_offsets.back() : std::ssize(rows(rank_idx));
  return received;
}

std::vector<int64_t> DispatchSpec::stream_starts(int src_rank) const {
  std::vector<int64_t> starts;
  if (arrangement_.is_by_rank()) {
    const layout::CountMatrix counts = this->counts();
    for (int dst_rank = 0; dst_rank < num_ranks(); ++dst_rank) {
      starts.push_back(0);
      for (int peer_rank = 0; peer_rank < src_rank; ++peer_rank)
        starts.back() += counts.to_rank(peer_rank, dst_rank);
    }
    return starts;
  }
  starts.resize(expert_rank_.size());
  for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
    int64_t offset = 0;
    for (const int expert_idx : experts_of(rank_idx)) {
      const auto& kept = kept_[static_cast<size_t>(expert_idx)];
      starts[static_cast<size_t>(expert_idx)] =
          offset + std::count_if(kept.begin(), kept.end(), [src_rank](const Origin& origin) {
            return origin.rank_idx < src_rank;
          });
      offset += padded(std::ssize(kept));
    }
  }
  return starts;
}

layout::CountMatrix DispatchSpec::counts() const {
  layout::CountMatrix counts(num_ranks(), num_experts());
  for (int src_rank = 0; src_rank < num_ranks(); ++src_rank) {
    int32_t* row = counts.row(src_rank);
    for (const auto& origins : kept_)
      *row++ = static_cast<int32_t>(
          std::count_if(origins.begin(), origins.end(), [src_rank](const Origin& origin) {
            return origin.rank_idx == src_rank;
          }));
    const AskedOfRank& source = asked_[static_cast<size_t>(src_rank)];
    for (int dst_rank = 0; dst_rank < num_ranks(); ++dst_rank)
      *row++ = static_cast<int32_t>(
          num_kept(src_rank, dst_rank) > 0 ? num_tokens_between(src_rank, dst_rank) : 0);
    *row++ = static_cast<int32_t>(num_fixed_rows(src_rank));
    *row = static_cast<int32_t>(source.num_topk);
  }
  return counts;
}

std::vector<int64_t> DispatchSpec::slots(int rank_idx) const {
  const AskedOfRank& source = asked_[static_cast<size_t>(rank_idx)];
  const int64_t num_slots =
      arrangement_.is_by_rank() ? std::min<int64_t>(source.num_topk, num_ranks()) : source.num_topk;
  std::vector<int64_t> slots(static_cast<size_t>(source.num_tokens() * num_slots), Slot::kNone);
  for (int64_t token_idx = 0; token_idx < source.num_tokens(); ++token_idx) {
    int64_t num_terms = 0;
    for (const Term& term : terms(rank_idx, token_idx)) {
      const int64_t i = arrangement_.is_by_rank() ? num_terms++ : term.topk_pos;
      slots[static_cast<size_t>(token_idx * num_slots + i)] =
          Slot::pack(term.rank_idx, term.row_idx);
    }
  }
  return slots;
}

std::string DispatchSpec::difference_of_layout(const layout::CountMatrix& asked) const {
  const layout::Placement placement(expert_rank_, num_ranks());
  const bool is_low_latency = arrangement_.layout == RowLayout::kLowLatency;
  const layout::CountMatrix kept = layout::keep_rows(asked, placement, arrangement_, rule_);
  const bool overflows =
      (is_low_latency || rule_.on_overflow == OnOverflow::kRaise) &&
      !layout::find_overflows(is_low_latency ? kept : asked, placement, arrangement_, rule_)
           .empty();
  if (overflows != has_overflow())
    return concat("layout finds ", overflows ? "an" : "no", " overflow");
  if (overflows)
    return "";
  if (kept.counts != counts().counts)
    return "layout keeps other rows";
  for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
    const layout::ReceivedRows right = received(rank_idx);
    const auto found = layout::received_rows(kept, placement, arrangement_, rank_idx);
    if (found.num_rows != right.num_rows ||
        found.num_tokens_per_expert != right.num_tokens_per_expert ||
        found.expert_offsets != right.expert_offsets)
      return concat("layout finds other rows on rank ", rank_idx);
    const AskedOfRank& source = asked_[static_cast<size_t>(rank_idx)];
    const std::vector<int64_t> right_slots = this->slots(rank_idx);
    std::vector<int64_t> slots(right_slots.size());
    layout::assign_slots(source.topk_idx.data(),
                         source.num_tokens(),
                         source.num_topk,
                         kept,
                         placement,
                         arrangement_,
                         rank_idx,
                         slots.data());
    if (slots != right_slots)
      return concat("layout has other slots for rank ", rank_idx);
  }
  return "";
}

}  // namespace moe::simt::checker
