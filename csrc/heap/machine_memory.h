#pragma once

#include <cstdint>
#include <string>

namespace moe::heap {

/// Bytes this process could fault in now without the kernel killing somebody: the least of
/// MemAvailable and what every memory cgroup above this process leaves. UINT64_MAX where unknown.
///
/// Other processes may take the same bytes a moment later; this catches requests that cannot fit,
/// not races between ranks.
uint64_t machine_available_bytes();

/// @throws CapacityError  The machine cannot give @p bytes and keep some for everybody else.
void check_machine(uint64_t bytes);

/// Throws for @p bytes that were not to be had.
/// @param limit_bytes  Most bytes of a segment, if something else than the machine limits it.
[[noreturn]] void throw_capacity(uint64_t bytes,
                                 const std::string& cause,
                                 uint64_t limit_bytes = UINT64_MAX);

/// Throws for a call of the system that failed with @p error: CapacityError, or SystemError where
/// file descriptors are short.
[[noreturn]] void throw_refused(uint64_t bytes, const char* call, int error);

}  // namespace moe::heap
