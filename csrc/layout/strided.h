#pragma once

#include <cstdint>

namespace moe::layout {

/// Places of a tensor's bytes, in logical row-major order: runs of adjacent bytes, and
/// dimensions that repeat the run. Two tensors with equal bytes in that order may differ in both.
///
/// Example: a bf16 tensor of shape (4, 3, 5) and strides (100, 10, 1) has runs of 10 bytes, sizes
/// (4, 3) and strides (200, 20).
struct StridedBytes {
  static constexpr int kMaxDims = 8;

  int64_t bytes = 0;      ///< bytes of all runs
  int64_t run_bytes = 0;  ///< adjacent; `bytes` when there are no dimensions
  int32_t num_dims = 0;
  int64_t sizes[kMaxDims] = {};    ///< outermost first, each > 1
  int64_t strides[kMaxDims] = {};  ///< in bytes; 0 where a source repeats its bytes

  bool is_contiguous() const { return num_dims == 0; }
  bool operator==(const StridedBytes& other) const = default;

  /// Bytes from the first byte to behind the last.
  int64_t span() const {
    if (bytes == 0)
      return 0;
    int64_t span = run_bytes;
    for (int dim = 0; dim < num_dims; ++dim)
      span += (sizes[dim] - 1) * strides[dim];
    return span;
  }

  /// Returns whether two runs may share bytes. Never false for a tensor where they do; true also
  /// for a few tensors whose dimensions interleave without sharing.
  bool may_overlap() const;
};

/// @param sizes    Size of every dimension, outermost first.
/// @param strides  Stride of every dimension in elements, each >= 0.
/// @throws InvalidArgument  more than kMaxDims dimensions are left when adjacent ones are merged.
StridedBytes make_strided(const int64_t* sizes,
                          const int64_t* strides,
                          int num_dims,
                          int64_t element_bytes);

}  // namespace moe::layout
