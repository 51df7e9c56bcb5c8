#pragma once

#include <cstdint>
#include <vector>

#include "layout/replicas.h"

namespace moe::layout {

/// Choices of one rank, as far as what they say together decides how many of its tokens are bound
/// for every rank once counts have become those of slots: sets of its tokens, a bit each. Offered
/// with a row where a token has one row a rank.
///
/// Byte map, uint64 [num_sets, num_words], token t in bit t % 64 of word t / 64:
///   [num_ranks]   tokens that choose an expert which lies on that rank alone
///   [num_shared]  of every expert with several slots: tokens that choose it
///   then, as often as needed, [num_shared], of each of those: bit 0, 1, ... of the number of times
///   that a token chooses it again
///
/// Example: 2 ranks have experts [0, 1] and [1, 2]. Tokens with choices (0, 1), (1, 1), (2, -1) are
/// the sets 0b001 and 0b100, of expert 1 0b011 and 0b010: once by token 0, and again by token 1.
struct TokenSetMap {
  int64_t num_ranks = 0;
  int64_t num_shared = 0;
  int64_t num_words = 0;  ///< words of a set

  static TokenSetMap make(const Replicas& replicas, const Placement& placement, int64_t num_tokens);
  MOE_HOST_DEVICE static int64_t words_of(int64_t num_tokens) { return (num_tokens + 63) / 64; }
  /// Sets of an expert with several slots, at most.
  MOE_HOST_DEVICE_CALLED static int32_t most_planes(int64_t num_topk) {
    int32_t num_planes = 1;
    MOE_ROLLED
    for (auto times = static_cast<uint32_t>(num_topk - 1); num_topk > 0 && times > 0; times /= 2)
      ++num_planes;
    return num_topk > 0 ? num_planes : 0;
  }

  /// Words, and bytes, of all sets, @p num_planes of every expert with several slots.
  MOE_HOST_DEVICE int64_t size(int64_t num_planes) const {
    return (num_ranks + num_planes * num_shared) * num_words;
  }
  MOE_HOST_DEVICE uint64_t bytes(int64_t num_planes) const {
    return static_cast<uint64_t>(size(num_planes)) * sizeof(uint64_t);
  }
  /// Sets of every expert with several slots in as many words.
  int64_t num_planes(int64_t size) const {
    const int64_t plane = num_shared * num_words;
    return plane == 0 ? 0 : (size - num_ranks * num_words) / plane;
  }
  /// Returns whether sets of tokens with @p num_topk choices may have as many bytes.
  bool may_have(uint64_t bytes, int64_t num_topk) const;
};

/// Experts with several slots among so many slots, at most.
inline int most_shared_experts(int num_slots) {
  return num_slots / 2;
}

/// Bytes of the sets of a rank at most, a multiple of 64; 0 where @p num_shared is.
int64_t most_set_bytes(int num_ranks, int num_shared, int64_t num_tokens, int64_t num_topk);

/// Counts as count_choices() of layout/routing.h where @p replicas is null. Else counts of logical
/// experts, in the first columns, and at every rank how many tokens may be bound for it at most.
/// @param sets  Overwritten with the sets of the choices where there are replicas; null where not
///   wanted.
/// @return the flat index of the first id outside [-1, num_ids()), or -1.
int64_t count_choices(const int64_t* topk_idx,
                      int64_t num_tokens,
                      int64_t num_topk,
                      const Replicas* replicas,
                      const Placement& placement,
                      int32_t* counts,
                      std::vector<uint64_t>* sets);

/// Says in one rank's counts how many of its tokens are bound for every rank. Sets may be anything.
/// @param sets    See TokenSetMap; of a size that may be.
/// @param counts  Counts of this rank as share_rows() has made them; those of ranks are
///   overwritten.
/// @return whether the sets can be of the choices that were counted.
bool count_tokens(const std::vector<uint64_t>& sets,
                  const TokenSetMap& map,
                  const Replicas& replicas,
                  const Placement& placement,
                  int32_t* counts);

}  // namespace moe::layout
