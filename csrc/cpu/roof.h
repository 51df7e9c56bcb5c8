#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cpu/row_kernels.h"

namespace moe::cpu {

/// Rates at which this machine moves the bytes of an operation and does nothing else: what the
/// benchmark divides an operation's bandwidth by. One table per instruction set.
///
/// Every pointer is aligned to 64 bytes and every size is a multiple of 64. Each function ends with
/// a store fence. Buffers must hold data like the operation's own: lines of zeros are written
/// faster than others on some machines. Cached stores are for bytes that stay in the caches, which
/// streaming ones would push out.
struct RoofKernels {
  const char* name;  ///< "portable", "avx2" or "avx512"

  /// The bytes of dispatch: reads each source row once and writes it to row r of each copy.
  void (*fan_out)(const std::byte* src,
                  int64_t num_rows,
                  int64_t row_bytes,
                  std::byte* const* dst,
                  int num_copies,
                  StoreMode mode);

  /// The bytes of combine: reads @p num_src streams and writes one, the sum of their 32-bit words
  /// (the cheapest arithmetic that needs every byte and gives lines as dense as the sources).
  /// NOTE: at some distances between the streams' beginnings memory itself reads up to a third
  /// slower; an operation faster than this roof has met one, not beaten the machine.
  void (*sum)(
      const std::byte* const* src, int num_src, int64_t bytes, std::byte* dst, StoreMode mode);

  void (*copy)(const std::byte* src, std::byte* dst, int64_t bytes, StoreMode mode);
};

/// The table for @p name, or null when this machine or build lacks it. "portable" always exists.
const RoofKernels* find_roof_kernels(std::string_view name);

/// The best table of this machine.
const RoofKernels& best_roof_kernels();

}  // namespace moe::cpu
