#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/row_kernels.h"
#include "layout/strided.h"

namespace moe::cpu {

/// Bytes in logical row-major order; without a shape they are adjacent.
struct Place {
  std::byte* data = nullptr;
  const layout::StridedBytes* shape = nullptr;  ///< null where bytes are adjacent
};

/// Copies logical bytes [@p src_from, + @p bytes) of @p src to those from @p dst_from of @p dst.
void copy_strided(const RowKernels& kernels,
                  const Place& src,
                  int64_t src_from,
                  const Place& dst,
                  int64_t dst_from,
                  int64_t bytes,
                  StoreMode mode);

/// A hash of @p bytes logical bytes in order, independent of strides and of the machine.
///
/// Words of 8 bytes (little-endian, padded with zeros to a multiple of 64 bytes) go round eight
/// lanes; a lane takes a word by `lane = (lane ^ word) * odd; lane ^= lane >> 29`, and the number
/// of bytes takes the lanes, then 0, in the same way. Every step can be undone, so tensors that
/// differ in words of one lane only (one byte, one element of up to 8 bytes) never have the same
/// sum.
uint64_t checksum(const Place& place, int64_t bytes);

}  // namespace moe::cpu
