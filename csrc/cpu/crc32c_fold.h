#pragma once

#include <cstddef>
#include <cstdint>

namespace moe::cpu {

/// Shortens a message by carry-less multiplication, and keeps its remainder: 128 bits of it
/// are added to those that lie a block later, multiplied by how far that is.
struct Crc32cFold {
  static constexpr size_t kBlockBytes = 256;

  uint64_t low;   ///< for the first 64 bits of 128: x to the power of a block's bits plus 32
  uint64_t high;  ///< for the other 64: less 32
};

#if defined(__x86_64__)
/// Shortens @p num_blocks blocks, > 0, to the one at @p folded. Needs VPCLMULQDQ.
/// @param crc  The register before them.
void fold_crc32c_avx512(const Crc32cFold& fold,
                        uint32_t crc,
                        const std::byte* data,
                        size_t num_blocks,
                        std::byte* folded);
#endif

}  // namespace moe::cpu
