#include "heap/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <string>

#include "core/process.h"
#include "heap/machine_memory.h"

namespace moe::heap {
namespace {

// Value of the kernel's interface; older system headers lack the name.
constexpr int kMadvCollapse = 25;

// Faulted in between two looks at what the machine has left.
constexpr uint64_t kFaultStepBytes = uint64_t{8} << 20;

// Each failure may have made the kernel compact memory, which takes long.
constexpr int kMostCollapseFailures = 8;

/// Populates without a signal where the kernel can (5.14), else touches every page.
void populate(std::byte* data, uint64_t bytes) {
  if (map_pages(data, bytes))
    return;
  const int error = errno;
  if (error != EINVAL && error != ENOSYS)
    throw_refused(bytes, "madvise(MADV_POPULATE_WRITE)", error);
  const uint64_t page_bytes = system_page_bytes();
  for (uint64_t offset = 0; offset < bytes; offset += page_bytes) {
    // An atomic add of zero: dirties the page, keeps what a peer may be writing there.
    __atomic_fetch_add(reinterpret_cast<uint8_t*>(data + offset), uint8_t{0}, __ATOMIC_RELAXED);
  }
}

/// Puts what it can of a range into 2 MiB pages; @return bytes of it that are.
uint64_t collapse(std::byte* data, uint64_t bytes, int* num_failures) {
  uint64_t huge_bytes = 0;
  if (reinterpret_cast<uintptr_t>(data) % kHugePageBytes != 0)
    return huge_bytes;
  for (uint64_t offset = 0; offset + kHugePageBytes <= bytes; offset += kHugePageBytes) {
    // MADV_COLLAPSE refuses a range without any page.
    populate(data + offset, system_page_bytes());
    if (::madvise(data + offset, kHugePageBytes, kMadvCollapse) == 0)
      huge_bytes += kHugePageBytes;
    else if (errno == EINVAL || errno == ENOSYS)
      *num_failures = kMostCollapseFailures;  // not offered here
    else
      ++*num_failures;
    if (*num_failures >= kMostCollapseFailures)
      break;
  }
  return huge_bytes;
}

}  // namespace

uint64_t fault_in(std::byte* data, uint64_t bytes, bool with_huge_pages) {
  int num_failures = 0;
  uint64_t huge_bytes = 0;
  for (uint64_t offset = 0; offset < bytes; offset += kFaultStepBytes) {
    // The kernel kills rather than refuse, so look again: other ranks may be growing as well.
    check_machine(bytes - offset);
    const uint64_t step_bytes = std::min(kFaultStepBytes, bytes - offset);
    if (with_huge_pages && num_failures < kMostCollapseFailures)
      huge_bytes += collapse(data + offset, step_bytes, &num_failures);
    // Maps what is there, allocates what collapsing left out.
    populate(data + offset, step_bytes);
  }
  return huge_bytes;
}

bool return_pages(std::byte* data, uint64_t bytes) {
  return ::madvise(data, bytes, MADV_REMOVE) == 0;
}

uint64_t huge_page_bytes_in_smaps(const std::byte* data, uint64_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(data);
  const uintptr_t last = first + bytes;
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool is_inside = false;
  uint64_t found_bytes = 0;
  while (std::getline(smaps, line)) {
    unsigned long start = 0;
    unsigned long end = 0;
    unsigned long kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &start, &end) == 2)
      is_inside = start < last && end > first;
    else if (is_inside && (std::sscanf(line.c_str(), "ShmemPmdMapped: %lu kB", &kib) == 1 ||
                           std::sscanf(line.c_str(), "FilePmdMapped: %lu kB", &kib) == 1))
      found_bytes += uint64_t{kib} * 1024;
  }
  return std::min(found_bytes, bytes);
}

}  // namespace moe::heap
