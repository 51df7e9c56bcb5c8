#pragma once

#include <cstddef>
#include <cstdint>

// Pages of a mapping: made resident, in 2 MiB pages where the kernel gives them, and returned.

namespace moe::heap {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

/// Allocates and maps every page of [data, data + bytes), in this process, without a signal when
/// memory is short. Contents are kept.
///
/// @return Bytes of it that MADV_COLLAPSE put in 2 MiB pages.
/// @throws CapacityError
uint64_t fault_in(std::byte* data, uint64_t bytes, bool with_huge_pages);

/// Returns the pages of a range to the system; it reads as zeros afterwards, in every process.
/// @return Whether the system took them.
bool return_pages(std::byte* data, uint64_t bytes);

/// Bytes of [data, data + bytes) that /proc/self/smaps shows mapped by 2 MiB pages. Exact for
/// whole mappings.
uint64_t huge_page_bytes_in_smaps(const std::byte* data, uint64_t bytes);

}  // namespace moe::heap
