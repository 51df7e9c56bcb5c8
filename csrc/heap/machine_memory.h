#pragma once

#include <cstdint>

namespace moe::heap {

/// Bytes this process could fault in now without the kernel killing somebody: the least of
/// MemAvailable and what every memory cgroup above this process leaves. UINT64_MAX where unknown.
///
/// Other processes may take the same bytes a moment later; this catches requests that cannot fit,
/// not races between ranks.
uint64_t machine_available_bytes();

}  // namespace moe::heap
