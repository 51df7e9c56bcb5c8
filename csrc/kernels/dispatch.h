#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/launch.h"
#include "kernels/exchange.h"
#include "layout/wire_format.h"

namespace moe::kernels {

/// Quantization of rows to e4m3 while they are written; see docs/quantization.md.
struct Quantize {
  int32_t is_on = 0;
  DType dtype = DType::kBFloat16;  ///< type of the source
  int32_t block = 128;             ///< channels per scale factor, see can_quantize()
  float least_amax = 0;            ///< least value that the greatest magnitude of a block counts as
  layout::ScaleFormat scale_format = layout::ScaleFormat::kFloat32;
};

/// Returns whether kernels make rows of @p format: e4m3 in blocks of lanes that are a power of two.
bool can_quantize(const layout::WireFormat& format, layout::ScaleFormat scale);

struct DispatchParams {
  Buffer buffer;
  Tables tables;
  /// Uncached. Else only num_tokens, num_topk, num_slots and is_by_rank count, and topk_idx where
  /// weights travel by rank.
  Choices choices;
  Replicas replicas;  ///< replicas as the exchange was told, uncached
  TokenSets sets;     ///< sets as the exchange was told, uncached

  const std::byte* x = nullptr;  ///< device [num_tokens, source_row_bytes]
  int64_t source_row_bytes = 0;
  int64_t row_bytes = 0;               ///< on the wire
  const std::byte* weights = nullptr;  ///< device [num_tokens, num_topk] of weight_bytes, or null
  int32_t weight_bytes = 0;
  int32_t is_cached = 0;
  int64_t* slots = nullptr;  ///< device [num_tokens, num_slots]: written, or read when cached

  Quantize quantize;
  int32_t num_scales = 0;             ///< scale factors that travel with a row
  int32_t scale_bytes = 0;            ///< bytes of a scale factor
  const std::byte* scales = nullptr;  ///< device: scale factors of rows that come quantized
  int64_t scale_row_stride = 0;       ///< bytes
  int64_t scale_step = 0;             ///< bytes

  layout::Arrangement arrangement;
  int32_t with_topk_idx = 0;
  int32_t is_plain = 0;   ///< loads and stores instead of bulk copies
  int32_t num_parts = 1;  ///< warps that share a row, see num_row_parts()
};

/// Sends: moves rows to their final slots, zeroes this rank's padding and releases done flags.
/// launch_receive() waits for those of others. Returns at once unless Tables::may_move. Peer::rows
/// of this rank is its own window, whether it sends itself rows or not.
/// @param launch  num_blocks is the number of SMs to use.
/// @throws InvalidArgument  rows of that dtype cannot be quantized.
void launch_dispatch(const device::Launch& launch, const DispatchParams& params);
/// Warps that are to share a row: where there are fewer rows than warps they are cut, so that all
/// SMs have some.
int num_row_parts(const device::Launch& launch, const DispatchParams& params);
/// Shared memory of a block of @p num_threads for rows of that size.
size_t dispatch_shared_bytes(const DispatchParams& params, int num_threads);

}  // namespace moe::kernels
