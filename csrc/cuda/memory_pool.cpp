#include "cuda/memory_pool.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "core/error.h"
#include "cuda/driver.h"

namespace moe::cuda {
namespace {

constexpr uint64_t kAlignment = 256;
// Bytes that the driver is asked for at least. Much is small, and each request may wait for the
// device.
constexpr uint64_t kLeastPieceBytes[] = {uint64_t{8} << 20, uint64_t{1} << 20};

uint64_t rounded(int64_t bytes) {
  MOE_CHECK(bytes >= 0, "an allocation must have >= 0 bytes, got ", bytes);
  return heap::round_up(std::max<uint64_t>(static_cast<uint64_t>(bytes), 1), kAlignment);
}

struct Pools {
  std::mutex mutex;
  std::map<int, std::shared_ptr<MemoryPool>> by_device;
};

Pools& pools() {
  static auto* instance = new Pools;  // memory outlives exit
  return *instance;
}

}  // namespace

MemoryPool::MemoryPool(int device_idx)
    : device_idx_(device_idx), side_stream_(std::make_shared<CudaStream>(device_idx)) {}

std::shared_ptr<MemoryPool> MemoryPool::of(int device_idx) {
  const std::lock_guard lock(pools().mutex);
  std::shared_ptr<MemoryPool>& pool = pools().by_device[device_idx];
  if (pool == nullptr)
    pool.reset(new MemoryPool(device_idx));
  return pool;
}

bool MemoryPool::are_all_idle() {
  const RelaxedCapture relaxed;
  const std::lock_guard lock(pools().mutex);
  return std::all_of(pools().by_device.begin(), pools().by_device.end(), [](const auto& entry) {
    return entry.second->marks_.are_idle();
  });
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

std::byte* MemoryPool::make(MemoryKind kind, uint64_t bytes) const {
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
  return static_cast<std::byte*>(data);
}

/// The caller holds growth_mutex.
void MemoryPool::grow(MemoryKind kind, uint64_t bytes) {
  const uint64_t least_bytes = heap::WindowAllocator::rounded_bytes(bytes);
  uint64_t piece_bytes = std::max(least_bytes, kLeastPieceBytes[static_cast<size_t>(kind)]);
  std::byte* data = nullptr;
  try {
    data = make(kind, piece_bytes);
  } catch (const CapacityError&) {
    if (piece_bytes == least_bytes)
      throw;
    piece_bytes = least_bytes;
    data = make(kind, piece_bytes);
  }
  Arena& arena = this->arena(kind);
  const std::lock_guard lock(arena.mutex);
  arena.pieces.push_back(data);
  arena.allocator.add_segment(static_cast<uint32_t>(arena.pieces.size() - 1), piece_bytes);
}

/// Asks the streams, which costs more than what is free already.
void MemoryPool::reclaim(Arena& arena) {
  const std::lock_guard lock(arena.mutex);
  arena.retired.reclaim([this](StreamMarks::Mark& mark) { return marks_.has_passed(mark); },
                        [&](Block* block) { arena.allocator.free(block); });
}

/// Null where nothing free is large enough.
MemoryPool::Block* MemoryPool::take(MemoryKind kind, uint64_t bytes, std::byte** data) {
  Arena& arena = this->arena(kind);
  const std::lock_guard lock(arena.mutex);
  Block* const block = arena.allocator.allocate(bytes);
  if (block != nullptr)
    *data = arena.pieces[block->segment_idx] + block->offset;
  return block;
}

std::shared_ptr<void> MemoryPool::reserve(MemoryKind kind, int64_t bytes) {
  const uint64_t wanted_bytes = rounded(bytes);
  const CurrentDevice current(device_idx_);
  const RelaxedCapture relaxed;
  Arena& arena = this->arena(kind);
  const std::lock_guard growth_lock(arena.growth_mutex);
  arena.reserved_bytes += wanted_bytes;
  std::shared_ptr<void> reserved(nullptr, [pool = shared_from_this(), kind, wanted_bytes](void*) {
    pool->arena(kind).reserved_bytes -= wanted_bytes;
  });
  reclaim(arena);
  {
    const std::lock_guard lock(arena.mutex);
    if (arena.allocator.counters().free_bytes >= arena.reserved_bytes)
      return reserved;
  }
  grow(kind, wanted_bytes);
  return reserved;
}

void MemoryPool::fill(void* memory, int value, int64_t bytes) {
  const CurrentDevice current(device_idx_);
  const RelaxedCapture relaxed;
  side_stream_->fill(memory, value, bytes);
  device::check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(side_stream_->handle())),
                     "filling memory");
}

std::shared_ptr<std::byte> MemoryPool::allocate(MemoryKind kind, int64_t bytes, bool is_zeroed) {
  const uint64_t rounded_bytes = rounded(bytes);
  std::byte* data = nullptr;
  Block* block = take(kind, rounded_bytes, &data);
  if (block == nullptr) {
    const CurrentDevice current(device_idx_);
    const RelaxedCapture relaxed;
    const std::lock_guard growth_lock(arena(kind).growth_mutex);
    do {
      reclaim(arena(kind));
      // Another thread may have asked for more meanwhile, or take what is added here.
      block = take(kind, rounded_bytes, &data);
      if (block == nullptr)
        grow(kind, rounded_bytes);
    } while (block == nullptr);
  }
  const std::shared_ptr<std::byte> owned(
      data, [pool = shared_from_this(), kind, block](std::byte*) { pool->give_back(kind, block); });
  if (is_zeroed && kind == MemoryKind::kHost)
    std::memset(data, 0, rounded_bytes);
  else if (is_zeroed)
    fill(data, 0, static_cast<int64_t>(rounded_bytes));
  return owned;
}

bool MemoryPool::has_passed(StreamMarks::Mark& mark) {
  const RelaxedCapture relaxed;
  return marks_.has_passed(mark);
}

void MemoryPool::give_back(MemoryKind kind, Block* block) noexcept {
  try {
    auto mark = marks_.mark();
    const std::lock_guard lock(arena(kind).mutex);
    arena(kind).retired.add(block, std::move(mark));
  } catch (...) {  // the machine has no memory to note it in: nobody will use it again
  }
}

}  // namespace moe::cuda
