#include "cuda/memory_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "cuda/driver.h"

namespace moe::cuda {
namespace {

constexpr uint64_t kAlignment = 256;

}  // namespace

MemoryPool::MemoryPool(int device_idx)
    : device_idx_(device_idx), side_stream_(std::make_shared<CudaStream>(device_idx)) {}

std::shared_ptr<MemoryPool> MemoryPool::of(int device_idx) {
  static std::mutex mutex;
  static auto* pools = new std::map<int, std::shared_ptr<MemoryPool>>;  // memory outlives exit
  const std::lock_guard lock(mutex);
  std::shared_ptr<MemoryPool>& pool = (*pools)[device_idx];
  if (pool == nullptr)
    pool.reset(new MemoryPool(device_idx));
  return pool;
}

void MemoryPool::watch(const std::shared_ptr<CudaStream>& stream) {
  marks_.watch(stream);
}

void MemoryPool::unwatch(CudaStream& stream) noexcept {
  try {
    const RelaxedCapture relaxed;
    marks_.unwatch(stream);
  } catch (...) {  // the process is exiting, or the context has failed: nobody will use it again
  }
}

MemoryPool::Block MemoryPool::make(MemoryKind kind, uint64_t bytes) {
  void* data = nullptr;
  const cudaError_t code =
      kind == MemoryKind::kDevice
          ? cudaMalloc(&data, bytes)
          : cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    throw CapacityError(
        concat(kind == MemoryKind::kDevice ? "device " : "page-locked host memory of device ",
               device_idx_,
               " has no ",
               bytes,
               " bytes more; free on the device: ",
               free_bytes),
        bytes,
        kind == MemoryKind::kDevice ? free_bytes : 0);
  }
  device::check_cuda(code, "allocating memory");
  return Block{static_cast<std::byte*>(data), bytes, nullptr};
}

/// The smallest block given back that is large enough, not wastefully so, and idle.
bool MemoryPool::take(MemoryKind kind, uint64_t bytes, Block* block) {
  const std::lock_guard lock(mutex_);
  auto& free = free_[static_cast<size_t>(kind)];
  for (auto entry = free.lower_bound(bytes); entry != free.end() && entry->first <= 2 * bytes;
       ++entry) {
    if (!marks_.has_passed(*entry->second.mark))
      continue;
    *block = std::move(entry->second);
    free.erase(entry);
    return true;
  }
  return false;
}

void MemoryPool::zero(MemoryKind kind, const Block& block) {
  if (kind == MemoryKind::kHost) {
    std::memset(block.data, 0, block.bytes);
    return;
  }
  fill(block.data, 0, static_cast<int64_t>(block.bytes));
}

void MemoryPool::fill(void* memory, int value, int64_t bytes) {
  const CurrentDevice current(device_idx_);
  const RelaxedCapture relaxed;
  side_stream_->fill(memory, value, bytes);
  device::check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(side_stream_->handle())),
                     "filling memory");
}

std::shared_ptr<std::byte> MemoryPool::allocate(MemoryKind kind, int64_t bytes, bool is_zeroed) {
  MOE_CHECK(bytes >= 0, "an allocation must have >= 0 bytes, got ", bytes);
  const CurrentDevice current(device_idx_);
  const RelaxedCapture relaxed;
  const uint64_t rounded = (std::max<uint64_t>(static_cast<uint64_t>(bytes), 1) + kAlignment - 1) /
                           kAlignment * kAlignment;
  Block block;
  if (!take(kind, rounded, &block))
    block = make(kind, rounded);
  try {
    if (is_zeroed)
      zero(kind, block);
  } catch (...) {
    give_back(kind, std::move(block));
    throw;
  }
  std::byte* data = block.data;
  return {data, [pool = shared_from_this(), kind, bytes = block.bytes](std::byte* memory) {
            pool->give_back(kind, Block{memory, bytes, nullptr});
          }};
}

bool MemoryPool::has_passed(StreamMarks::Mark& mark) {
  const RelaxedCapture relaxed;
  return marks_.has_passed(mark);
}

void MemoryPool::give_back(MemoryKind kind, Block block) noexcept {
  try {
    block.mark = marks_.mark();
    const std::lock_guard lock(mutex_);
    free_[static_cast<size_t>(kind)].emplace(block.bytes, std::move(block));
  } catch (...) {  // the machine has no memory to note it in: nobody will use it again
  }
}

}  // namespace moe::cuda
