#include "ops/marked_ranges.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/error.h"

namespace moe::ops {

namespace {

/// Flags that are read before one looks whether some was set: a loop without branches.
constexpr int64_t kFlagsAtOnce = 4096;

bool any_set(const uint8_t* flags, int64_t count) {
  for (int64_t at = 0; at < count; at += kFlagsAtOnce) {
    const uint8_t* const end = flags + std::min(at + kFlagsAtOnce, count);
    if (std::accumulate(flags + at, end, uint8_t{0}, std::bit_or<uint8_t>()) != 0)
      return true;
  }
  return false;
}

}  // namespace

void mark_ranges(std::span<const uint8_t> flags,
                 std::span<const MarkedRange> ranges,
                 std::span<uint8_t> marked) {
  for (const MarkedRange& range : ranges) {
    MOE_CHECK(0 <= range.first_block && range.end_block <= std::ssize(marked),
              "blocks ",
              range.first_block,
              " to ",
              range.end_block,
              " of ",
              marked.size());
    MOE_CHECK(0 <= range.first_flag && range.end_flag <= std::ssize(flags),
              "flags ",
              range.first_flag,
              " to ",
              range.end_flag,
              " of ",
              flags.size());
    if (any_set(flags.data() + range.first_flag, range.end_flag - range.first_flag))
      std::fill(marked.begin() + range.first_block, marked.begin() + range.end_block, uint8_t{1});
  }
}

}  // namespace moe::ops
