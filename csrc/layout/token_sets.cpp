#include "layout/token_sets.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <span>

#include "core/math.h"

namespace moe::layout {

namespace {

constexpr int64_t kTokensPerWord = 64;

}  // namespace

TokenSetMap TokenSetMap::make(const Replicas& replicas,
                              const Placement& placement,
                              int64_t num_tokens) {
  return {placement.num_ranks, std::ssize(replicas.shared_experts), words_of(num_tokens)};
}

int64_t most_set_bytes(int num_ranks, int num_shared, int64_t num_tokens, int64_t num_topk) {
  if (num_shared == 0)
    return 0;
  const TokenSetMap map{num_ranks, num_shared, TokenSetMap::words_of(num_tokens)};
  return round_up(static_cast<int64_t>(map.bytes(TokenSetMap::most_planes(num_topk))), 64);
}

bool TokenSetMap::may_have(uint64_t bytes, int64_t num_topk) const {
  const int64_t most = std::max<int64_t>(most_planes(num_topk), 1);
  for (int64_t num_planes = 1; num_planes <= most; ++num_planes)
    if (bytes == this->bytes(num_planes))
      return true;
  return false;
}

namespace {

/// Adds 1 to the number of times that a token chooses an expert again.
/// @param at  word of the set of those that choose it
void add_again(const TokenSetMap& map, size_t at, uint64_t bit, std::vector<uint64_t>* sets) {
  const auto plane = static_cast<size_t>(map.num_shared * map.num_words);
  for (at += plane; at < sets->size() && ((*sets)[at] & bit) != 0; at += plane)
    (*sets)[at] ^= bit;
  if (at >= sets->size())
    sets->resize(static_cast<size_t>(map.size(map.num_planes(std::ssize(*sets)) + 1)));
  (*sets)[at] |= bit;
}

}  // namespace

namespace {

/// @tparam kWithSets  Whether there are sets, which have room for one plane.
template <bool kWithSets>
int64_t count_each(const int64_t* topk_idx,
                   int64_t num_tokens,
                   int64_t num_topk,
                   const Replicas& replicas,
                   const TokenSetMap& map,
                   int32_t* counts,
                   std::vector<uint64_t>* sets) {
  const auto num_experts = static_cast<uint64_t>(replicas.num_experts());
  const int32_t* const set_of = replicas.set_of_expert.data();
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx) {
    const int64_t word_idx = token_idx / kTokensPerWord;
    const uint64_t bit = uint64_t{1} << token_idx % kTokensPerWord;
    uint64_t* words = kWithSets ? sets->data() + word_idx : nullptr;
    for (int64_t k = 0; k < num_topk; ++k) {
      const auto expert_idx = static_cast<uint64_t>(*topk_idx++);
      if (expert_idx >= num_experts) {
        if (static_cast<int64_t>(expert_idx) == -1)
          continue;
        return token_idx * num_topk + k;
      }
      ++counts[expert_idx];
      if constexpr (kWithSets) {
        const int64_t set_idx = set_of[expert_idx];
        uint64_t& word = words[set_idx * map.num_words];
        // One test: whether a rank is bound already is hard to predict.
        if ((word & (set_idx < map.num_ranks ? 0 : bit)) == 0) {
          word |= bit;
        } else {
          add_again(map, static_cast<size_t>(&word - sets->data()), bit, sets);
          words = sets->data() + word_idx;
        }
      }
    }
  }
  return -1;
}

}  // namespace

int64_t count_choices(const int64_t* topk_idx,
                      int64_t num_tokens,
                      int64_t num_topk,
                      const Replicas* replicas,
                      const Placement& placement,
                      int32_t* counts,
                      std::vector<uint64_t>* sets) {
  if (replicas == nullptr)
    return count_choices(topk_idx, num_tokens, num_topk, placement, counts);
  const auto map = TokenSetMap::make(*replicas, placement, num_tokens);
  std::fill_n(counts, placement.num_experts + placement.num_ranks, 0);
  if (sets != nullptr)
    sets->assign(static_cast<size_t>(map.size(1)), 0);
  const auto& count = sets == nullptr ? count_each<false> : count_each<true>;
  const int64_t bad_idx = count(topk_idx, num_tokens, num_topk, *replicas, map, counts, sets);
  if (bad_idx >= 0)
    return bad_idx;
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

/// Sets of one rank on their way to sets of tokens bound for every rank.
class Binding {
 public:
  Binding(const uint64_t* sets,
          int64_t num_planes,
          const TokenSetMap& map,
          const Replicas& replicas,
          const Placement& placement,
          const int32_t* counts)
      : sets_(sets),
        num_planes_(num_planes),
        map_(map),
        replicas_(replicas),
        placement_(placement),
        counts_(counts),
        bound_(sets, sets + map.num_ranks * map.num_words) {}

  /// Hands the choices of one expert, by its place among those with several slots, to its slots.
  /// @return whether there are as many as its slots have.
  bool bind(int64_t shared_idx) {
    const uint64_t* const planes = sets_ + (map_.num_ranks + shared_idx) * map_.num_words;
    slots_ = replicas_.slots.of_expert(replicas_.shared_experts[static_cast<size_t>(shared_idx)]);
    at_ = 0;
    left_ = 0;
    go_on(0);
    for (int64_t w = 0; w < map_.num_words; ++w) {
      const uint64_t chosen = planes[w];
      int64_t num_choices = std::popcount(chosen);
      for (int64_t p = 1; p < num_planes_; ++p)
        num_choices += int64_t{std::popcount(plane(planes, p)[w])} << (p - 1);
      if (num_choices <= left_) {
        left_ -= num_choices;
        bound_row()[w] |= chosen;
      } else if (!bind_each(planes, w, chosen)) {
        return false;
      }
    }
    return left_ == 0 && !go_on(at_ + 1);
  }

  int64_t num_bound(int rank_idx) const {
    const uint64_t* const row = bound_.data() + rank_idx * map_.num_words;
    int64_t number = 0;
    for (int64_t w = 0; w < map_.num_words; ++w)
      number += std::popcount(row[w]);
    return number;
  }

 private:
  const uint64_t* plane(const uint64_t* planes, int64_t p) const {
    return planes + p * map_.num_shared * map_.num_words;
  }
  uint64_t* bound_row() {
    const int32_t slot = slots_[at_];
    return bound_.data() + placement_.expert_rank[static_cast<size_t>(slot)] * map_.num_words;
  }

  /// Goes to the first slot from @p at that has rows. @return whether there is one.
  bool go_on(size_t at) {
    for (; at < slots_.size(); ++at)
      if (counts_[slots_[at]] != 0) {
        at_ = at;
        left_ = counts_[slots_[at]];
        return true;
      }
    return false;
  }

  /// Tokens of a word that slots divide: the choices of one token may be in several.
  bool bind_each(const uint64_t* planes, int64_t w, uint64_t chosen) {
    for (; chosen != 0; chosen &= chosen - 1) {
      const int bit_idx = std::countr_zero(chosen);
      int64_t num_choices = 1;
      for (int64_t p = 1; p < num_planes_; ++p)
        num_choices += static_cast<int64_t>(plane(planes, p)[w] >> bit_idx & 1) << (p - 1);
      while (num_choices > 0) {
        if (left_ == 0 && !go_on(at_ + 1))
          return false;
        const int64_t taken = std::min(num_choices, left_);
        bound_row()[w] |= uint64_t{1} << bit_idx;
        num_choices -= taken;
        left_ -= taken;
      }
    }
    return true;
  }

  const uint64_t* sets_;
  int64_t num_planes_;
  const TokenSetMap& map_;
  const Replicas& replicas_;
  const Placement& placement_;
  const int32_t* counts_;
  std::vector<uint64_t> bound_;     ///< [num_ranks, num_words]
  std::span<const int32_t> slots_;  ///< slots of the expert
  size_t at_ = 0;                   ///< the slot that choices go to, and how many it still has
  int64_t left_ = 0;
};

}  // namespace

bool count_tokens(const std::vector<uint64_t>& sets,
                  const TokenSetMap& map,
                  const Replicas& replicas,
                  const Placement& placement,
                  int32_t* counts) {
  int32_t* const to_rank = counts + placement.num_experts;
  std::fill_n(to_rank, placement.num_ranks, 0);
  Binding binding(sets.data(), map.num_planes(std::ssize(sets)), map, replicas, placement, counts);
  for (int64_t shared_idx = 0; shared_idx < map.num_shared; ++shared_idx)
    if (!binding.bind(shared_idx))
      return false;
  for (int rank_idx = 0; rank_idx < placement.num_ranks; ++rank_idx) {
    int64_t num_rows = 0;
    for (const int32_t slot : placement.local_experts[static_cast<size_t>(rank_idx)])
      num_rows += counts[slot];
    const int64_t num_tokens = binding.num_bound(rank_idx);
    if (num_tokens > num_rows || (num_tokens == 0) != (num_rows == 0))
      return false;
    to_rank[rank_idx] = static_cast<int32_t>(num_tokens);
  }
  return true;
}

}  // namespace moe::layout
