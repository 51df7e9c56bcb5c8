#pragma once

#include <cstdint>

#include "device/primitives.h"
#include "device/warp.h"
#include "kernels/buffer.h"
#include "kernels/replicas.h"
#include "layout/row.h"
#include "layout/token_sets.h"

// Rows by rank of replicas: how many tokens of every rank are bound for each, where a token has one
// row a rank. What layout/token_sets.cpp says, by warps. Words have 32 bits here, one for each
// lane; the bytes are the same.

namespace moe::kernels {

/// Words of a set of that many tokens.
MOE_DEVICE int32_t num_set_words(int64_t num_tokens) {
  return static_cast<int32_t>(2 * layout::TokenSetMap::words_of(num_tokens));
}

/// Sets of one rank, in the heap.
struct RankSets {
  uint32_t* words;
  int32_t num_words;  ///< words of a set

  MOE_DEVICE uint32_t* of_set(int32_t set_idx) const { return words + set_idx * num_words; }
};

/// Arguments of writing the sets of a rank.
struct WrittenSets {
  const int64_t* asked_idx;  ///< [num_tokens, num_topk]
  const int32_t* set_of_expert;
  uint32_t* words;
  int32_t num_tokens;
  int32_t num_topk;
  int32_t num_experts;
  int32_t num_shared;
  int32_t num_ranks;
};

/// Writes the sets of this rank's choices. The warps of all blocks share them, 32 tokens at a time.
MOE_DEVICE_CALLED void write_token_sets(WrittenSets out) {
  const RankSets sets{out.words, num_set_words(out.num_tokens)};
  const int num_sets =
      out.num_ranks + layout::TokenSetMap::most_planes(out.num_topk) * out.num_shared;
  const int plane = out.num_shared * sets.num_words;
#pragma unroll 1
  for (int w = device::block_idx() * device::num_warps() + device::warp_idx(); w < sets.num_words;
       w += device::num_blocks() * device::num_warps()) {
#pragma unroll 1
    for (int i = device::lane_idx(); i < num_sets; i += device::kWarpSize)
      device::store(sets.of_set(i) + w, uint32_t{0});
    device::sync_warp();
    const int token_idx = device::kWarpSize * w + device::lane_idx();
#pragma unroll 1
    for (int k = 0; k < out.num_topk; ++k) {
      int32_t set_idx = -1;
      if (token_idx < out.num_tokens) {
        const int64_t expert_idx =
            device::load_constant(out.asked_idx + int64_t{token_idx} * out.num_topk + k);
        if (expert_idx >= 0 && expert_idx < out.num_experts)
          set_idx = device::load_constant(out.set_of_expert + expert_idx);
      }
      // One lane adds the tokens of all with the same set.
      const uint32_t equals = device::match_any(static_cast<uint32_t>(set_idx));
      if (set_idx >= 0 && device::first_bit(equals) == device::lane_idx()) {
        uint32_t* word = sets.of_set(set_idx) + w;
        uint32_t chosen = device::load(word);
        device::store(word, chosen | equals);
        uint32_t again = set_idx < out.num_ranks ? 0 : chosen & equals;
#pragma unroll 1
        while (again != 0) {
          word += plane;
          chosen = device::load(word);
          device::store(word, chosen ^ again);
          again &= chosen;
        }
      }
      device::sync_warp();
    }
  }
}

/// Finds how many tokens of every rank are bound for each, by one block, once the counts are of
/// slots and sets are known.
class TokenCounts {
 public:
  MOE_DEVICE TokenCounts(const Buffer& buffer,
                         const Replicas& replicas,
                         const TokenSets& own_sets,
                         int32_t* counts)
      : buffer_(buffer),
        replicas_(replicas),
        own_sets_(own_sets),
        counts_(counts),
        num_columns_(layout::Row::num_counts(buffer.num_ranks, buffer.num_experts)) {}

  /// First step: which tokens' choices of an expert each of its slots gets, of all ranks. A warp
  /// takes an expert of a rank at a time. Ends with a barrier.
  MOE_DEVICE void cut_runs() const {
    const int num_pairs = buffer_.num_ranks * replicas_.num_shared;
#pragma unroll 1
    for (int i = device::warp_idx(); i < num_pairs; i += device::num_warps()) {
      const int src_rank = i / replicas_.num_shared;
      const RankSets sets = sets_of(src_rank);
      const int shared_idx = i % replicas_.num_shared;
      const int32_t expert_idx = device::load_constant(replicas_.shared_experts + shared_idx);
      const int most_planes =
          layout::TokenSetMap::most_planes(device::load(counts_of(src_rank) + num_columns_ - 1));
      // Hardly any token chooses an expert again: those sets are read where some have to.
      int num_planes = 1;
#pragma unroll 1
      while (!cut(src_rank, shared_idx, expert_idx, sets, num_planes) && num_planes < most_planes)
        num_planes = most_planes;
    }
    device::sync_block();
  }

  /// Second step. A warp takes two ranks at a time; of this rank it keeps which tokens those are.
  /// @param say  say(src_rank, dst_rank, num_bound), by lane 0
  template <typename Say>
  MOE_DEVICE void count(const Say& say) const {
    const int num_ranks = buffer_.num_ranks;
#pragma unroll 1
    for (int i = device::warp_idx(); i < num_ranks * num_ranks; i += device::num_warps()) {
      const int src_rank = i / num_ranks;
      const int dst_rank = i % num_ranks;
      const int32_t num_bound = bind(src_rank, dst_rank, sets_of(src_rank));
      if (device::lane_idx() == 0) {
        device::store(counts_of(src_rank) + buffer_.num_experts + dst_rank, num_bound);
        say(src_rank, dst_rank, num_bound);
      }
    }
    device::sync_block();
  }

 private:
  MOE_DEVICE RankSets sets_of(int rank_idx) const {
    const uint64_t place = device::load(replicas_.set_places + rank_idx);
    return {reinterpret_cast<uint32_t*>(place), device::load(replicas_.set_words + rank_idx)};
  }
  MOE_DEVICE int32_t* counts_of(int src_rank) const {
    return counts_ + int64_t{src_rank} * num_columns_;
  }
  MOE_DEVICE int32_t* run_of(int src_rank, int32_t slot) const {
    return replicas_.run_tokens + (int64_t{src_rank} * buffer_.num_experts + slot) * 2;
  }
  MOE_DEVICE int32_t plane_words(const RankSets& sets) const {
    return replicas_.num_shared * sets.num_words;
  }

  /// @return whether that is as many choices as the slots have.
  MOE_DEVICE bool cut(int src_rank,
                      int shared_idx,
                      int32_t expert_idx,
                      const RankSets& sets,
                      int num_planes) const {
    const uint32_t* const chosen = sets.of_set(buffer_.num_ranks + shared_idx);
    const int32_t* const begins = replicas_.table.expert_begin + expert_idx;
    const int begin = device::load_constant(begins);
    const int end = device::load_constant(begins + 1);
    int32_t num_before = 0;
    int32_t num_rows = 0;
#pragma unroll 1
    for (int first = 0; first < sets.num_words; first += device::kWarpSize) {
      const int w = first + device::lane_idx();
      int32_t number = 0;
      if (w < sets.num_words) {
        number = device::population(device::load(chosen + w));
#pragma unroll 1
        for (int p = 1; p < num_planes; ++p)
          number += device::population(device::load(chosen + p * plane_words(sets) + w)) << (p - 1);
      }
      const int32_t inclusive = device::warp_inclusive_sum(number);
      const int32_t own_begin = num_before + inclusive - number;
      num_rows = 0;
#pragma unroll 1
      for (int j = begin; j < end; ++j) {
        const int32_t slot = device::load_constant(replicas_.table.expert_slots + j);
        const int32_t count = device::load(counts_of(src_rank) + slot);
#pragma unroll 1
        for (int side = 0; side < 2 && count > 0; ++side) {
          const int32_t choice = num_rows + (side == 0 ? 0 : count - 1) - own_begin;
          if (choice >= 0 && choice < number)
            device::store(run_of(src_rank, slot) + side,
                          token_of(chosen, sets, num_planes, w, choice));
        }
        num_rows += count;
      }
      num_before += device::shuffle(inclusive, device::kWarpSize - 1);
    }
    device::sync_warp();
    return num_before == num_rows;
  }

  /// The token of the choice behind @p num_before others in word @p w.
  MOE_DEVICE int32_t token_of(const uint32_t* chosen,
                              const RankSets& sets,
                              int num_planes,
                              int w,
                              int32_t num_before) const {
    int bit_idx = 0;
#pragma unroll 1
    for (uint32_t left = device::load(chosen + w); left != 0; left &= left - 1) {
      bit_idx = device::first_bit(left);
      int32_t times = 1;
#pragma unroll 1
      for (int p = 1; p < num_planes; ++p) {
        const uint32_t again = device::load(chosen + p * plane_words(sets) + w);
        times += static_cast<int32_t>(again >> bit_idx & 1) << (p - 1);
      }
      if (num_before < times)
        break;
      num_before -= times;
    }
    return device::kWarpSize * w + bit_idx;
  }

  /// Bits of the tokens of word @p w from the first of a run to its last.
  MOE_DEVICE static uint32_t bits_of_run(const int32_t* run, int w) {
    const int32_t from = device::load(run) - device::kWarpSize * w;
    const int32_t to = device::load(run + 1) - device::kWarpSize * w;
    if (from >= device::kWarpSize || to < 0)
      return 0;
    const uint32_t below = from <= 0 ? 0 : (uint32_t{1} << from) - 1;
    const uint32_t up_to = to >= device::kWarpSize - 1 ? ~uint32_t{0} : (uint32_t{2} << to) - 1;
    return up_to & ~below;
  }

  MOE_DEVICE int32_t bind(int src_rank, int dst_rank, const RankSets& sets) const {
    const int32_t* const begins = replicas_.table.rank_begin + dst_rank;
    const int begin = device::load_constant(begins);
    const int end = device::load_constant(begins + 1);
    int32_t num_bound = 0;
#pragma unroll 1
    for (int first = 0; first < sets.num_words; first += device::kWarpSize) {
      const int w = first + device::lane_idx();
      const bool is_there = w < sets.num_words;
      uint32_t bound = is_there ? device::load(sets.of_set(dst_rank) + w) : 0;
#pragma unroll 1
      for (int j = begin; j < end; ++j) {
        const int32_t slot = device::load_constant(replicas_.table.shared_slots + j);
        if (device::load(counts_of(src_rank) + slot) == 0)
          continue;
        const int32_t set_idx = device::load_constant(
            replicas_.set_of_expert + device::load_constant(replicas_.table.slot_expert + slot));
        const uint32_t run = is_there ? bits_of_run(run_of(src_rank, slot), w) : 0;
        if (run != 0)
          bound |= device::load(sets.of_set(set_idx) + w) & run;
      }
      const int32_t number = device::population(bound);
      const int32_t inclusive = device::warp_inclusive_sum(number);
      if (is_there && src_rank == buffer_.rank_idx) {
        const int64_t place = int64_t{dst_rank} * sets.num_words + w;
        device::store(own_sets_.bound_tokens + place, bound);
        device::store(own_sets_.bound_before + place, num_bound + inclusive - number);
      }
      num_bound += device::shuffle(inclusive, device::kWarpSize - 1);
    }
    return num_bound;
  }

  const Buffer& buffer_;
  const Replicas& replicas_;
  const TokenSets& own_sets_;
  int32_t* counts_;
  int num_columns_;
};

}  // namespace moe::kernels
