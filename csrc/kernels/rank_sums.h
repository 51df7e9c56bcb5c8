#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/launch.h"
#include "kernels/buffer.h"
#include "layout/rank_sums.h"

// A combine of which every rank adds the rows of a token that lie with it, before their sum
// crosses.

namespace moe::kernels {

struct RankRequestsParams {
  int32_t num_ranks = 0;
  int64_t num_tokens = 0;
  int32_t num_slots = 0;
  const int64_t* slots = nullptr;      ///< device [num_tokens, num_slots]
  const std::byte* weights = nullptr;  ///< device [num_tokens, num_slots], or null for none
  int32_t weight_bytes = 0;            ///< 4, or 8 with float64 rows
  int32_t number_bytes = 4;            ///< bytes of the type that rows are added in
  Offer rows;                          ///< see layout::RankSumsMap::Header
  std::byte* window = nullptr;         ///< heap: layout::RankSumsMap
};

/// Writes all of a window that lies before the sums. In front of the exchange, which lets peers
/// read it.
void launch_rank_requests(const device::Launch& launch, const RankRequestsParams& params);

struct RankSumsParams {
  Buffer buffer;
  Tables tables;
  DType dtype = DType::kBFloat16;
  int64_t hidden = 0;
  const std::byte* rows = nullptr;  ///< device or heap: this rank's rows
  std::byte* sums = nullptr;        ///< heap: of the window that launch_rank_requests() wrote
};

/// Behind the exchange, which has found what the peers offer: adds the rows that lie here for each
/// token that has some, in the order of its slots, rounds once, and tells who pulls. Ends when the
/// sums that this rank pulls are there, and Tables::peers has a second part: where each rank's rows
/// lie that are alone. Returns at once unless Tables::may_move.
void launch_rank_sums(const device::Launch& launch, const RankSumsParams& params);

}  // namespace moe::kernels
