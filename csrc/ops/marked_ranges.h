#pragma once

#include <cstdint>
#include <span>

namespace moe::ops {

/// Blocks that a part of a mask is of.
struct MarkedRange {
  int64_t first_block;
  int64_t end_block;
  int64_t first_flag;
  int64_t end_flag;
};

/// Sets @p marked for the blocks of each range that has a flag set.
/// @throws InvalidArgument  A range ends beyond the flags or the blocks.
void mark_ranges(std::span<const uint8_t> flags,
                 std::span<const MarkedRange> ranges,
                 std::span<uint8_t> marked);

}  // namespace moe::ops
