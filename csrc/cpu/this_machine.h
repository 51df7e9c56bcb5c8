#pragma once

#include <cstdint>

namespace moe::cpu {

/// Bytes of the largest cache that one core sees, read once; 32 MiB where the machine does not say.
int64_t last_level_cache_bytes();

}  // namespace moe::cpu
