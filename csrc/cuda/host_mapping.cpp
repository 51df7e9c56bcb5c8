#include "cuda/host_mapping.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/driver.h"

namespace moe::cuda {
namespace {

/// Pages [start, end), locked by this object unless somebody else had locked them.
class LockedPages {
 public:
  LockedPages(uintptr_t start, uintptr_t end) : start_(start), end_(end) {
    const cudaError_t code = cudaHostRegister(reinterpret_cast<void*>(start),
                                              end - start,
                                              cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (code == cudaErrorHostMemoryAlreadyRegistered) {
      cudaGetLastError();
      return;
    }
    if (code != cudaSuccess)
      device::throw_cuda_error(
          code, concat("page-locking ", end - start, " bytes of host memory for kernels"));
    is_own_ = true;
  }
  ~LockedPages() {
    const RelaxedCapture relaxed;
    if (is_own_)
      cudaHostUnregister(reinterpret_cast<void*>(start_));
  }
  LockedPages(const LockedPages&) = delete;
  LockedPages& operator=(const LockedPages&) = delete;

  uintptr_t start() const { return start_; }
  uintptr_t end() const { return end_; }

 private:
  uintptr_t start_;
  uintptr_t end_;
  bool is_own_ = false;
};

struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, std::weak_ptr<LockedPages>> pages;  ///< by start; ranges do not overlap
};

Registry& registry() {
  static auto* instance = new Registry;  // memory may be unlocked during exit
  return *instance;
}

/// Every range that covers a part of [start, end); what nobody has locked is locked now.
std::vector<std::shared_ptr<LockedPages>> lock_pages(uintptr_t start, uintptr_t end) {
  std::vector<std::shared_ptr<LockedPages>> held;
  auto& pages = registry().pages;
  std::erase_if(pages, [](const auto& entry) { return entry.second.expired(); });
  uintptr_t position = start;
  auto entry = pages.upper_bound(start);
  if (entry != pages.begin())
    --entry;
  for (; entry != pages.end() && entry->first < end; ++entry) {
    std::shared_ptr<LockedPages> known = entry->second.lock();
    if (known == nullptr || known->end() <= position)
      continue;
    if (known->start() > position) {
      auto gap = std::make_shared<LockedPages>(position, known->start());
      pages[position] = gap;
      held.push_back(std::move(gap));
    }
    position = known->end();
    held.push_back(std::move(known));
  }
  if (position < end) {
    auto rest = std::make_shared<LockedPages>(position, end);
    pages[position] = rest;
    held.push_back(std::move(rest));
  }
  return held;
}

}  // namespace

std::shared_ptr<const std::byte> map_host_memory(const void* memory, int64_t bytes) {
  MOE_CHECK(bytes > 0, "mapped host memory must have > 0 bytes, got ", bytes);
  const RelaxedCapture relaxed;
  const auto page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t start = address / page_bytes * page_bytes;
  const uintptr_t end =
      (address + static_cast<uintptr_t>(bytes) + page_bytes - 1) / page_bytes * page_bytes;
  std::vector<std::shared_ptr<LockedPages>> held;
  {
    const std::lock_guard lock(registry().mutex);
    held = lock_pages(start, end);
  }
  void* mapped = nullptr;
  device::check_cuda(cudaHostGetDevicePointer(&mapped, const_cast<void*>(memory), 0),
                     "asking where kernels find host memory");
  MOE_CHECK(held.size() == 1 || mapped == memory,
            "kernels find host memory at another address on this machine, and ",
            bytes,
            " bytes lie in ",
            held.size(),
            " page-locked ranges");
  return {static_cast<const std::byte*>(mapped),
          [held = std::move(held)](const std::byte*) mutable {
            const std::lock_guard lock(registry().mutex);
            held.clear();
          }};
}

}  // namespace moe::cuda
