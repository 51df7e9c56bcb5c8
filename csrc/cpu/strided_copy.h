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

/// Bytes that a checksum is computed of at a time; see checksum().
constexpr int64_t kChecksumBlockBytes = 16384;

/// Copies as copy_strided() does, and adds up the blocks of the checksum of @p src that begin among
/// the bytes copied; one that ends behind them is read to its end. Where @p dst has no data,
/// nothing is copied.
/// @param src_bytes  Logical bytes of all of @p src.
/// @return What finish_checksum() takes once the sum has all blocks, modulo 2^64 and in any order.
uint64_t copy_with_checksum(const RowKernels& kernels,
                            const Place& src,
                            int64_t src_bytes,
                            int64_t src_from,
                            const Place& dst,
                            int64_t dst_from,
                            int64_t bytes,
                            StoreMode mode);

/// The checksum of @p bytes logical bytes whose blocks add up to @p blocks.
uint64_t finish_checksum(uint64_t blocks, int64_t bytes);

/// A hash of @p bytes logical bytes in order, independent of strides and of the machine.
///
/// Bytes are cut into blocks of kChecksumBlockBytes, each hashed by itself, as another thread may
/// copy the next. A lane takes a word by `lane = (lane ^ word) * odd; lane ^= lane >> 29`. 32 lanes
/// begin as `odd` that has taken the lane's number. Words of 8 bytes of a block (little-endian,
/// padded with zeros to a multiple of 256 bytes) go round them. Then each lane from the eighth on
/// becomes the lane 8 before it that has taken 0 and it, in ascending order; `odd` takes the
/// block's number, the last 8 lanes and 0, which is the block's hash. The sum of all, modulo 2^64,
/// takes the number of bytes, and 0. Every step can be undone, so tensors that differ in words of
/// one lane of one block only (one byte, one element of up to 8 bytes) never have the same
/// checksum.
uint64_t checksum(const Place& place, int64_t bytes);

}  // namespace moe::cpu
