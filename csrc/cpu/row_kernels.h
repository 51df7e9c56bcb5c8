#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/dtype.h"
#include "cpu/streaming_stores.h"
#include "layout/scale_format.h"

namespace moe::cpu {

/// Quantization of a row to e4m3; docs/quantization.md has the arithmetic. A block with a NaN or
/// an infinity has a scale factor of NaN (float32 0x7FC00000, byte 0xFF) and data bytes of 0x7F,
/// all of them.
struct RowQuantization {
  DType dtype = DType::kBFloat16;  ///< type of the source: bf16, fp16 or fp32
  int block = 128;                 ///< channels per scale factor, see can_quantize()
  float least_amax = 0;            ///< least value that the greatest magnitude of a block counts as
  layout::ScaleFormat scale_format = layout::ScaleFormat::kFloat32;
  int64_t hidden = 0;  ///< elements; the last block may be shorter

  int64_t num_blocks() const { return (hidden + block - 1) / block; }
};

/// Returns whether RowKernels::quantize_row makes rows of @p format: e4m3 in blocks of 32, 64 or
/// 128.
bool can_quantize(const layout::WireFormat& format, layout::ScaleFormat scale);
RowQuantization row_quantization(const layout::WireFormat& format,
                                 layout::ScaleFormat scale,
                                 DType dtype,
                                 int64_t hidden);

/// Sources of a sum that are added among themselves first: [begin, end).
struct SourceGroup {
  int begin = 0;
  int end = 0;
};

/// The inner loops over rows, one table per instruction set; all tables give the same bits.
///
/// Sources may have any alignment of their element type. Destinations of `fan_out` are aligned to
/// 16 bytes; other destinations to their element type (a kernel falls back to cached stores where a
/// streaming store needs more). A kernel does not fence: the caller executes `store_fence()` after
/// its last streaming call, before it reports its part done. Subnormals are kept: the caller holds
/// a `FloatingPointScope`.
struct RowKernels {
  const char* name;  ///< "portable", "avx2" or "avx512"

  /// Copies one row to @p num_dst places. @p bytes is a multiple of 16. The row is read once.
  void (*fan_out)(
      const std::byte* src, std::byte* const* dst, int num_dst, int64_t bytes, StoreMode mode);

  /// dst[i] = round(sum over k ascending of src[k][i] * weight[k]), starting from +0.0, one IEEE
  /// addition per row; the product is rounded before it is added, never fused. Accumulates in
  /// float32 (float64 rows: float64); rounds once, to nearest even; a NaN is stored as 0x7FC0,
  /// 0x7E00, 0x7FC00000 or 0x7FF8000000000000.
  /// @param weights   null, or num_src values of float32 (float64 for float64 rows).
  /// @param prefetch  null, or num_prefetch addresses of rows that the next call will read: their
  ///   first bytes are brought into the cache while the last of this row are added.
  void (*sum_rows)(DType dtype,
                   const std::byte* const* src,
                   const void* weights,
                   int num_src,
                   int64_t hidden,
                   std::byte* dst,
                   StoreMode mode,
                   const std::byte* const* prefetch,
                   int num_prefetch);

  /// Adds as sum_rows, but the sources of @p group among themselves, in ascending k from +0.0,
  /// and their sum, not rounded to @p dtype, is one term after those before them.
  void (*sum_grouped_rows)(DType dtype,
                           const std::byte* const* src,
                           const void* weights,
                           int num_src,
                           SourceGroup group,
                           int64_t hidden,
                           std::byte* dst,
                           StoreMode mode);

  /// Returns <gradient, value> (element i into lane i mod 32 in ascending i, from +0.0, product
  /// rounded before it is added; then lanes pairwise 16, 8, 4, 2, 1), and stores
  /// round(weight * gradient[i]) over gradient[i]. Float32 arithmetic; float64 rows: float64.
  double (*scale_and_dot)(
      DType dtype, std::byte* gradient, const std::byte* value, double weight, int64_t hidden);

  /// Copies @p bytes (any number) between places that do not overlap.
  void (*copy)(const std::byte* src, std::byte* dst, int64_t bytes, StoreMode mode);

  /// Takes @p bytes, a multiple of kChecksumRoundBytes, into the lanes of a checksum, and copies
  /// them to @p dst, which may be null, as `copy` does: the bytes are read once.
  /// @param next    Start of what is taken afterwards; fetched ahead, as the processor cannot guess
  ///   it. Need not be readable.
  /// @param before  The lanes as they were, which may be @p lanes. Those of a block that begins lie
  ///   in a table: registers are loaded late from stores narrower than they are, of which all must
  ///   have left the core.
  void (*absorb_copy)(const std::byte* src,
                      std::byte* dst,
                      int64_t bytes,
                      StoreMode mode,
                      const std::byte* next,
                      const uint64_t* before,
                      uint64_t* lanes);

  /// Zeroes @p bytes (any number).
  void (*zero)(std::byte* dst, int64_t bytes, StoreMode mode);

  /// Orders streaming stores of the calling thread before its later stores.
  void (*store_fence)();

  /// Quantizes one row in registers and writes its `hidden` bytes to @p num_dst places. The row is
  /// read once. Destinations may have any alignment (cached stores are used where streaming ones
  /// need more).
  /// @param scales  num_blocks() values: float32, or uint8 for kUe8m0; ordinary memory.
  void (*quantize_row)(const RowQuantization& quantization,
                       const std::byte* src,
                       std::byte* const* dst,
                       int num_dst,
                       void* scales,
                       StoreMode mode);
};

/// The table for @p name, or null when this machine or build lacks it. "portable" always exists.
const RowKernels* find_row_kernels(std::string_view name);

/// The best table of this machine.
const RowKernels& best_row_kernels();

/// While it lives, the calling thread rounds to nearest even and keeps subnormals (x86: MXCSR
/// without FTZ and DAZ; aarch64: FPCR without FZ); then the former state returns.
class FloatingPointScope {
 public:
  FloatingPointScope();
  ~FloatingPointScope();
  FloatingPointScope(const FloatingPointScope&) = delete;
  FloatingPointScope& operator=(const FloatingPointScope&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace moe::cpu
