#include <climits>

#include "device/primitives.h"
#include "device/warp.h"
#include "kernels/exchange.h"

namespace moe::kernels {

namespace {

struct CountParams {
  Buffer buffer;
  Choices choices;
};

// Shared memory of a block:
//   [0, 8 * kMaxWarps)   scratch
//   then int32           counts of every expert, then of every distinct rank
constexpr int kMaxWarps = 32;
constexpr size_t kScratchBytes = 8 * kMaxWarps;

/// Tokens [begin, end) that one block counts.
struct Chunk {
  int64_t begin;
  int64_t end;
};

/// The smallest rank above @p above that owns an expert chosen by the token, or num_ranks.
MOE_DEVICE int next_rank(const CountParams& params, int64_t token_idx, int above) {
  const Choices& choices = params.choices;
  int next = params.buffer.num_ranks;
  for (int k = 0; k < choices.num_topk; ++k) {
    const int64_t expert_idx =
        device::load_constant(choices.topk_idx + token_idx * choices.num_topk + k);
    if (expert_idx < 0 || expert_idx >= params.buffer.num_experts)
      continue;
    const int rank_idx = device::load_constant(params.buffer.expert_rank + expert_idx);
    if (rank_idx > above && rank_idx < next)
      next = rank_idx;
  }
  return next;
}

/// Counts the distinct ranks of every token; by rank, lists them instead, ascending and then -1,
/// where their places will be. One thread per token.
MOE_DEVICE void count_ranks(const CountParams& params, const Chunk& chunk, int32_t* to_rank) {
  const Choices& choices = params.choices;
  for (int64_t token_idx = chunk.begin + device::thread_idx(); token_idx < chunk.end;
       token_idx += device::num_threads()) {
    int num_bound = 0;
    int rank_idx = next_rank(params, token_idx, -1);
    for (; rank_idx < params.buffer.num_ranks; rank_idx = next_rank(params, token_idx, rank_idx)) {
      if (choices.is_by_rank)
        device::store(choices.place_in_chunk + token_idx * choices.num_slots + num_bound,
                      static_cast<int32_t>(rank_idx));
      else
        device::add_shared(to_rank + rank_idx, int32_t{1});
      ++num_bound;
    }
    for (; choices.is_by_rank && num_bound < choices.num_slots; ++num_bound)
      device::store(choices.place_in_chunk + token_idx * choices.num_slots + num_bound,
                    int32_t{-1});
  }
}

/// Looks for ids that are none; by rank, also counts the choices of every expert.
/// @return the first flat index whose id is outside the range, or INT64_MAX, of this thread.
MOE_DEVICE int64_t check_choices(const CountParams& params,
                                 const Chunk& chunk,
                                 int32_t* to_expert) {
  const Choices& choices = params.choices;
  const int64_t end = chunk.end * choices.num_topk;
  int64_t first_bad = INT64_MAX;
  for (int64_t i = chunk.begin * choices.num_topk + device::thread_idx(); i < end;
       i += device::num_threads()) {
    const int64_t expert_idx = device::load_constant(choices.topk_idx + i);
    if (expert_idx < -1 || expert_idx >= params.buffer.num_experts)
      first_bad = i < first_bad ? i : first_bad;
    else if (choices.is_by_rank && expert_idx >= 0)
      device::add_shared(to_expert + expert_idx, int32_t{1});
  }
  return first_bad;
}

/// Gives every entry its place among those of the same expert (by rank: of the same rank) and
/// counts them. One warp, 32 entries at a time in order: a place depends on nothing else.
MOE_DEVICE void place_choices(const CountParams& params, const Chunk& chunk, int32_t* counts) {
  const Choices& choices = params.choices;
  const int64_t end = chunk.end * choices.num_slots;
  const int lane_idx = device::lane_idx();
  const uint32_t lower_lanes = (uint32_t{1} << lane_idx) - 1;
  for (int64_t first = chunk.begin * choices.num_slots; first < end; first += device::kWarpSize) {
    const int64_t i = first + lane_idx;
    int32_t key = -1;
    if (i < end && choices.is_by_rank) {
      key = device::load(choices.place_in_chunk + i);
    } else if (i < end) {
      const int64_t expert_idx = device::load_constant(choices.topk_idx + i);
      if (expert_idx >= 0 && expert_idx < params.buffer.num_experts)
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
      device::store(choices.place_in_chunk + i, key < 0 ? -1 : place);
  }
}

MOE_KERNEL void count_choices(CountParams params) {
  const Choices& choices = params.choices;
  std::byte* const shared = device::shared_memory();
  auto* const scratch = reinterpret_cast<int64_t*>(shared);
  auto* const to_expert = reinterpret_cast<int32_t*>(shared + kScratchBytes);
  int32_t* const to_rank = to_expert + params.buffer.num_experts;
  const int num_counts = params.buffer.num_experts + params.buffer.num_ranks;
  for (int chunk_idx = device::block_idx(); chunk_idx < choices.num_chunks;
       chunk_idx += device::num_blocks()) {
    for (int i = device::thread_idx(); i < num_counts; i += device::num_threads())
      device::store(to_expert + i, int32_t{0});
    device::sync_block();
    const int64_t begin = int64_t{chunk_idx} * choices.tokens_per_chunk;
    const int64_t end = begin + choices.tokens_per_chunk;
    const Chunk chunk{begin, end < choices.num_tokens ? end : choices.num_tokens};
    const int64_t first_bad = check_choices(params, chunk, to_expert);
    count_ranks(params, chunk, to_rank);
    const int64_t bad_idx = -device::block_max(-first_bad, scratch);
    if (device::thread_idx() == 0)
      device::store(choices.bad_choice + chunk_idx, bad_idx == INT64_MAX ? int64_t{-1} : bad_idx);
    // What the other threads listed is there: block_max() has barriers.
    if (device::warp_idx() == 0)
      place_choices(params, chunk, choices.is_by_rank ? to_rank : to_expert);
    device::sync_block();
    int32_t* const chunk_counts = choices.chunk_counts + int64_t{chunk_idx} * num_counts;
    for (int i = device::thread_idx(); i < num_counts; i += device::num_threads())
      device::store(chunk_counts + i, device::load(to_expert + i));
    device::sync_block();
  }
}

}  // namespace

size_t count_shared_bytes(int num_ranks, int num_experts) {
  return kScratchBytes + sizeof(int32_t) * static_cast<size_t>(num_ranks + num_experts);
}

void launch_count(const device::Launch& launch, const Buffer& buffer, const Choices& choices) {
  device::Launch shape = launch;
  shape.shared_bytes = count_shared_bytes(buffer.num_ranks, buffer.num_experts);
  device::launch(count_choices, shape, CountParams{buffer, choices});
}

}  // namespace moe::kernels
