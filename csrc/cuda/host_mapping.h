#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace moe::cuda {

/// Page-locks the pages of [memory, memory + bytes) for every device of this process and says where
/// the current device finds @p memory. Pages that this module has locked already are shared, pages
/// that somebody else has locked are taken as they are; the last owner of a page unlocks it.
///
/// @throws CudaError
std::shared_ptr<const std::byte> map_host_memory(const void* memory, int64_t bytes);

}  // namespace moe::cuda
