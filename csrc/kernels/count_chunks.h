#pragma once

#include <climits>
#include <cstdint>

#include "device/primitives.h"
#include "device/warp.h"
#include "kernels/exchange.h"
#include "kernels/finish.h"

// The choices of a rank, counted by the blocks of the kernel that exchanges the counts.

namespace moe::kernels {

/// Arguments of counting.
struct Counted {
  Choices choices;
  const int32_t* expert_rank;  ///< Buffer::expert_rank; null where tokens of ranks do not count
  int32_t num_experts;         ///< columns of counts
  int32_t num_ids;             ///< ids, at most as many
  int32_t num_ranks;

  MOE_DEVICE bool is_id(int64_t expert_idx) const {
    return expert_idx >= 0 && expert_idx < num_ids;
  }
};

/// Successive tokens that one block counts, and what Choices has of them.
struct Chunk {
  const int64_t* asked_idx;  ///< [num_tokens, num_topk]
  int64_t* topk_idx;         ///< copy of these
  int32_t* places;           ///< [num_tokens, num_slots]
  int32_t num_tokens;

  MOE_DEVICE static Chunk make(const Choices& choices, int chunk_idx) {
    const int64_t begin = int64_t{chunk_idx} * choices.tokens_per_chunk;
    const int64_t left = choices.num_tokens - begin;
    return {
        choices.asked_idx + begin * choices.num_topk,
        choices.topk_idx + begin * choices.num_topk,
        choices.place_in_chunk + begin * choices.num_slots,
        left < choices.tokens_per_chunk ? static_cast<int32_t>(left) : choices.tokens_per_chunk};
  }
};

/// Ranks, of the 32 from @p first on, that own an expert chosen by a token, a bit for each.
/// @param chosen  choices of the token, [num_topk]
MOE_DEVICE uint32_t bound_ranks(const Counted& counted, const int64_t* chosen, int first) {
  uint32_t bound = 0;
  for (int k = 0; k < counted.choices.num_topk; ++k) {
    const int64_t expert_idx = device::load_constant(chosen + k);
    if (!counted.is_id(expert_idx))
      continue;
    const auto bit =
        static_cast<uint32_t>(device::load_constant(counted.expert_rank + expert_idx) - first);
    if (bit < 32)
      bound |= uint32_t{1} << bit;
  }
  return bound;
}

/// Counts the distinct ranks of every token; by rank, lists them instead, ascending and then -1,
/// where their places will be. One thread per token.
MOE_DEVICE void count_ranks(const Counted& counted, const Chunk& chunk, int32_t* to_rank) {
  const Choices& choices = counted.choices;
#pragma unroll 1
  for (int token_idx = device::thread_idx(); token_idx < chunk.num_tokens;
       token_idx += device::num_threads()) {
    const int64_t* const chosen = chunk.asked_idx + token_idx * choices.num_topk;
    int32_t* const places = chunk.places + token_idx * choices.num_slots;
    int num_bound = 0;
#pragma unroll 1
    for (int first = 0; first < counted.num_ranks; first += 32) {
#pragma unroll 1
      for (uint32_t bound = bound_ranks(counted, chosen, first); bound != 0; bound &= bound - 1) {
        const int32_t rank_idx = first + device::first_bit(bound);
        if (choices.is_by_rank)
          device::store(places + num_bound, rank_idx);
        else
          device::add_shared(to_rank + rank_idx, int32_t{1});
        ++num_bound;
      }
    }
#pragma unroll 1
    for (; choices.is_by_rank && num_bound < choices.num_slots; ++num_bound)
      device::store(places + num_bound, int32_t{-1});
  }
}

/// Copies ids and looks for those that are none; by rank, also counts the choices of every expert.
/// @return the first index in the chunk whose id is outside the range, or INT_MAX, of this thread.
MOE_DEVICE int check_choices(const Counted& counted, const Chunk& chunk, int32_t* to_expert) {
  const Choices& choices = counted.choices;
  const int end = chunk.num_tokens * choices.num_topk;
  int first_bad = INT_MAX;
#pragma unroll 1
  for (int i = device::thread_idx(); i < end; i += device::num_threads()) {
    const int64_t expert_idx = device::load_constant(chunk.asked_idx + i);
    device::store(chunk.topk_idx + i, expert_idx);
    if (expert_idx != -1 && !counted.is_id(expert_idx))
      first_bad = i < first_bad ? i : first_bad;
    else if (choices.is_by_rank && expert_idx >= 0)
      device::add_shared(to_expert + expert_idx, int32_t{1});
  }
  return first_bad;
}

/// Gives every entry its place among those of the same expert (by rank: of the same rank) and
/// counts them. One warp, 32 entries at a time in order: a place depends on nothing else.
MOE_DEVICE void place_choices(const Counted& counted, const Chunk& chunk, int32_t* counts) {
  const Choices& choices = counted.choices;
  const int end = chunk.num_tokens * choices.num_slots;
  const int lane_idx = device::lane_idx();
  const uint32_t lower_lanes = (uint32_t{1} << lane_idx) - 1;
#pragma unroll 1
  for (int first = 0; first < end; first += device::kWarpSize) {
    const int i = first + lane_idx;
    int32_t key = -1;
    if (i < end && choices.is_by_rank) {
      key = device::load(chunk.places + i);
    } else if (i < end) {
      const int64_t expert_idx = device::load_constant(chunk.asked_idx + i);
      if (counted.is_id(expert_idx))
        key = static_cast<int32_t>(expert_idx);
    }
    const uint32_t equals = device::match_any(static_cast<uint32_t>(key));
    const int32_t before = key < 0 ? 0 : device::load(counts + key);
    // All lanes have read before one of them writes, and it has written before the next entries.
    device::sync_warp();
    if (key >= 0 && device::first_bit(equals) == lane_idx)
      device::store(counts + key, before + device::population(equals));
    device::sync_warp();
    const int32_t place = before + device::population(equals & lower_lanes);
    if (i < end)
      device::store(chunk.places + i, key < 0 ? -1 : place);
  }
}

/// Counts the choices of chunks, which the blocks of the kernel take in turn, and keeps a copy of
/// them; all threads of all blocks call, with values: what is referred to would lie in memory.
/// @param scratch  shared, 8 bytes per warp
/// @param counts   shared, int32 [num_experts + num_ranks]
MOE_DEVICE_CALLED void count_chunks(Counted counted, int64_t* scratch, int32_t* counts) {
  const Choices& choices = counted.choices;
  int32_t* const to_rank = counts + counted.num_experts;
  const int num_counts = counted.num_experts + counted.num_ranks;
#pragma unroll 1
  for (int chunk_idx = device::block_idx(); chunk_idx < choices.num_chunks;
       chunk_idx += device::num_blocks()) {
#pragma unroll 1
    for (int i = device::thread_idx(); i < num_counts; i += device::num_threads())
      device::store(counts + i, int32_t{0});
    device::sync_block();
    const Chunk chunk = Chunk::make(choices, chunk_idx);
    const int first_bad = check_choices(counted, chunk, counts);
    if (counted.expert_rank != nullptr)
      count_ranks(counted, chunk, to_rank);
    const auto bad_idx = static_cast<int>(-device::block_max(-int64_t{first_bad}, scratch));
    if (device::thread_idx() == 0) {
      const int64_t first = int64_t{chunk_idx} * choices.tokens_per_chunk * choices.num_topk;
      device::store(choices.bad_choice + chunk_idx,
                    bad_idx == INT_MAX ? int64_t{-1} : first + bad_idx);
    }
    // The lists of the other threads are there: block_max() has barriers.
    if (device::warp_idx() == 0)
      place_choices(counted, chunk, choices.is_by_rank ? to_rank : counts);
    device::sync_block();
    int32_t* const chunk_counts = choices.chunk_counts + int64_t{chunk_idx} * num_counts;
#pragma unroll 1
    for (int i = device::thread_idx(); i < num_counts; i += device::num_threads())
      device::store(chunk_counts + i, device::load(counts + i));
    device::sync_block();
  }
}

}  // namespace moe::kernels
