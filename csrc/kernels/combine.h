#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/launch.h"
#include "kernels/buffer.h"
#include "layout/routing.h"

namespace moe::kernels {

/// Cut of rows for warps that add a piece at a time. Numbers of 0 where there are no rows.
struct RowPieces {
  int32_t num_pieces = 0;  ///< pieces of a row
  int32_t bytes = 0;       ///< bytes of each piece but the last
  int32_t last_bytes = 0;
  int32_t num_stages = 0;  ///< stages that a warp has for pieces which come by bulk copy
};

struct CombineParams {
  Buffer buffer;
  Tables tables;

  DType dtype = DType::kBFloat16;
  int64_t hidden = 0;  ///< elements; 0 when only weights are pulled
  int64_t num_tokens = 0;
  int32_t num_topk = 0;
  int32_t num_slots = 0;
  int32_t num_recv_topk = 0;
  layout::Arrangement arrangement;
  const int64_t* slots = nullptr;     ///< device [num_tokens, num_slots]
  const int64_t* topk_idx = nullptr;  ///< device [num_tokens, num_topk], to pull weights by rank
  const std::byte* weights =
      nullptr;                  ///< device [num_tokens, num_topk] applied while adding, or null
  int32_t weight_bytes = 0;     ///< 4, or 8 with float64 rows
  std::byte* sums = nullptr;    ///< device or heap [num_tokens, hidden]
  std::byte* pulled = nullptr;  ///< device or heap [num_tokens, num_topk] of pulled_bytes
  int32_t pulled_bytes = 0;     ///< bytes of a weight that is pulled, 0 for none
  int32_t is_plain = 0;         ///< loads and stores instead of bulk copies
  RowPieces pieces;             ///< cut of rows in units of 16 bytes; launch_combine() fills it in
  /// Across nodes: every other node adds a token's rows there, and one row of it travels.
  int32_t node_reduction = 0;
  /// device or heap [num_tokens, num_slots]: of the rows that are added, where not `slots`
  const int64_t* row_slots = nullptr;
};

/// Threads of a block, at most; registers do not reach for more.
constexpr int kMaxCombineThreads = 512;

/// Pulls the rows of every token, adds them in slot order and writes the sum once; pulls weights;
/// releases done flags and waits for those of every rank that pulls here. Returns at once unless
/// Tables::may_move.
void launch_combine(const device::Launch& launch, const CombineParams& params);
size_t combine_shared_bytes(const CombineParams& params, int num_threads);

struct WeightedGradientParams {
  DType dtype = DType::kBFloat16;
  int64_t num_rows = 0;
  int64_t hidden = 0;
  std::byte* gradient = nullptr;       ///< device or heap [num_rows, hidden], scaled in place
  const std::byte* values = nullptr;   ///< device or heap [num_rows, hidden]
  const std::byte* weights = nullptr;  ///< device [num_rows] of weight_bytes
  std::byte* dots = nullptr;           ///< device [num_rows] of weight_bytes
  int32_t weight_bytes = 4;
};

/// Local: weights[:, None] * gradient in place, and the dot products <gradient, values> as they
/// were.
void launch_weighted_gradient(const device::Launch& launch, const WeightedGradientParams& params);

}  // namespace moe::kernels
