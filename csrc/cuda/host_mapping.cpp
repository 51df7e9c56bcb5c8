#include "cuda/host_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "cuda/driver.h"

namespace moe::cuda {
namespace {

/// Pages of shared memory, and the mapping of them that is locked.
struct LockedPages {
  uintptr_t start;
  uintptr_t end;
  std::byte* copy;
  std::weak_ptr<const void> owner;  ///< once it has gone, other memory may lie at start
};

struct Registry {
  std::mutex mutex;
  std::vector<LockedPages> pages;
  std::mutex lock_mutex;  ///< held while pages are locked, which may wait for the device
};

Registry& registry() {
  static auto* instance = new Registry;  // kernels may run during exit
  return *instance;
}

/// Null for pages that are not locked.
std::byte* find_copy(uintptr_t start, uintptr_t end) {
  const std::lock_guard lock(registry().mutex);
  std::erase_if(registry().pages, [](const LockedPages& pages) { return pages.owner.expired(); });
  for (const LockedPages& pages : registry().pages)
    if (pages.start <= start && end <= pages.end)
      return pages.copy + (start - pages.start);
  return nullptr;
}

std::byte* lock_pages(uintptr_t start, uintptr_t end) {
  const size_t bytes = end - start;
  // Length 0 maps the same pages at a second place, which stay when the first is unmapped.
  void* const copy = ::mremap(reinterpret_cast<void*>(start), 0, bytes, MREMAP_MAYMOVE);
  if (copy == MAP_FAILED)
    throw CudaError(
        concat("mapping ", bytes, " bytes of shared memory for kernels: ", std::strerror(errno)),
        cudaErrorUnknown);
  const cudaError_t code =
      cudaHostRegister(copy, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (code != cudaSuccess) {
    ::munmap(copy, bytes);
    device::throw_cuda_error(code,
                             concat("page-locking ", bytes, " bytes of host memory for kernels"));
  }
  ::madvise(copy, bytes, MADV_DONTFORK);  // as the first mapping
  return static_cast<std::byte*>(copy);
}

}  // namespace

const std::byte* map_host_memory(const void* memory,
                                 int64_t bytes,
                                 const std::shared_ptr<const void>& owner) {
  MOE_CHECK(bytes > 0, "mapped host memory must have > 0 bytes, got ", bytes);
  const RelaxedCapture relaxed;
  const auto page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t start = address / page_bytes * page_bytes;
  const uintptr_t end =
      (address + static_cast<uintptr_t>(bytes) + page_bytes - 1) / page_bytes * page_bytes;
  const std::lock_guard lock_lock(registry().lock_mutex);
  std::byte* copy = find_copy(start, end);
  if (copy == nullptr) {
    copy = lock_pages(start, end);
    const std::lock_guard lock(registry().mutex);
    registry().pages.push_back({start, end, copy, owner});
  }
  void* mapped = nullptr;
  device::check_cuda(cudaHostGetDevicePointer(&mapped, copy + (address - start), 0),
                     "asking where kernels find host memory");
  return static_cast<const std::byte*>(mapped);
}

}  // namespace moe::cuda
