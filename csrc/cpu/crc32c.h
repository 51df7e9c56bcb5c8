#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace moe::cpu {

/// CRC-32C (Castagnoli; RFC 3720): finds every error of up to three bits in messages of up to
/// 256 MiB, and every burst of up to 32 bits. No protection against forgery.
struct Crc32c {
  const char* name;  ///< "portable", "sse4.2", "avx512" (with VPCLMULQDQ) or "armv8-crc"

  /// The checksum of bytes whose first part has the checksum @p crc, 0 for none, and is followed by
  /// @p bytes bytes from @p data on, at any alignment.
  uint32_t (*extend)(uint32_t crc, const std::byte* data, size_t bytes);
};

/// The one of that name, or null where this machine or build lacks it. "portable" always exists.
const Crc32c* find_crc32c(std::string_view name);

/// The fastest of this machine. All give the same numbers.
const Crc32c& best_crc32c();

}  // namespace moe::cpu
