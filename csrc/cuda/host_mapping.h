#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace moe::cuda {

/// Page-locks the pages of [memory, memory + bytes) for every device of this process and says where
/// the current device finds @p memory: for good, in a mapping of its own. Pages that were locked
/// before for the same owner are found again.
///
/// They are never unlocked: cudaHostUnregister may wait for every kernel of the process, and one of
/// them for what this thread does next. What that costs is the segment of the heap in which they
/// lie, 2 MiB for a communicator's abort word, until the process ends.
///
/// @param memory  Address in a shared mapping.
/// @param owner   Object that keeps @p memory the same as long as it lives.
/// @throws CudaError
const std::byte* map_host_memory(const void* memory,
                                 int64_t bytes,
                                 const std::shared_ptr<const void>& owner);

}  // namespace moe::cuda
