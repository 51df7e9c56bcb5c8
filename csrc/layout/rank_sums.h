#pragma once

#include <cstdint>

#include "core/math.h"
#include "core/symmetric_memory.h"

namespace moe::layout {

/// Offer of a rank in a combine in which every rank adds the rows of a token that lie with it:
/// its requests, and below them the sums that it makes for others.
///
/// Byte map, T tokens of S slots, numbers of b bytes in which rows are added (regions start at
/// multiples of 64):
///   [0, 8 T S)            of every token the first slot on each rank, ranks ascending, then
///                         Slot::kNone: where its sums lie. A row without a weight that is alone on
///                         its rank is its own sum: its slot names rank R + r of R ranks. Only
///                         this rank reads it
///   [slots_offset, ...)   T S slots, as in the plan
///   [weights_offset, ...) T S weights of b bytes, 1 where none is applied
///   [header_offset, ...)  Header
///   [sums_offset, ...)    a row for each row of this rank: the sum of a token's rows here, in the
///                         place of the first of them. Not of one alone that Header::rows has
/// Offers the sums; peers find the rest from there.
///
/// Example: T = 3, S = 2, b = 4: slots_offset 64, weights_offset 128, header_offset 192,
/// sums_offset 256.
struct RankSumsMap {
  struct Header {
    int64_t num_tokens;
    int64_t num_slots;
    int64_t is_weighted;
    /// Rows that are pulled as they lie in this rank's heap, alone and without a weight; 0
    /// bytes where they do not.
    Offer rows;
  };
  static_assert(sizeof(Header) <= 64);

  int64_t slots_offset = 0;
  int64_t weights_offset = 0;
  int64_t header_offset = 0;
  int64_t sums_offset = 0;

  MOE_HOST_DEVICE static RankSumsMap make(int64_t num_tokens,
                                          int64_t num_slots,
                                          int64_t number_bytes) {
    const int64_t num_requests = num_tokens * num_slots;
    RankSumsMap map;
    map.slots_offset = round_up(num_requests * 8, 64);
    map.weights_offset = 2 * map.slots_offset;
    map.header_offset = map.weights_offset + round_up(num_requests * number_bytes, 64);
    map.sums_offset = map.header_offset + 64;
    return map;
  }
  MOE_HOST_DEVICE int64_t bytes(int64_t num_rows, int64_t row_bytes) const {
    return sums_offset + num_rows * row_bytes;
  }

  /// Finds the header by the sums that a peer offers, whatever its tokens.
  static MOE_HOST_DEVICE const Header* header(const std::byte* sums) {
    return reinterpret_cast<const Header*>(sums - 64);
  }
};

}  // namespace moe::layout
