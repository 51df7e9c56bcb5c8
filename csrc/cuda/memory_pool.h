#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/cuda_stream.h"
#include "cuda/retired_blocks.h"
#include "heap/window_allocator.h"
#include "runtime/stream_marks.h"

namespace moe::cuda {

enum class MemoryKind { kDevice, kHost };

using runtime::StreamMarks;

/// Memory of one device that is reused, never returned: cudaFree waits for every stream of the
/// process, and one of them may wait for what this thread does next. So may cudaMalloc and
/// cudaHostAlloc, so memory is taken in large pieces, before it is needed where that is known.
///
/// A block is reused once all work has ended that was put, before it was given back, into any
/// stream this pool knows; see StreamMarks. Giving back calls nothing of the driver and is legal
/// while streams are captured and at exit.
class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  /// The pool of a device, one for all ranks of this process. Uses one stream.
  static std::shared_ptr<MemoryPool> of(int device_idx);

  /// @param is_zeroed  Else it holds anything. Zeroing memory of the device has the host wait.
  /// @throws CapacityError  the device or the machine has no such memory.
  std::shared_ptr<std::byte> allocate(MemoryKind kind, int64_t bytes, bool is_zeroed);
  /// Sees to it that so much is free beside what others have reserved.
  /// @return What stands for it, as long as it lives.
  /// @throws CapacityError
  std::shared_ptr<void> reserve(MemoryKind kind, int64_t bytes);

  /// For copies and fills that wait for nothing, so that all ranks of this process can share it.
  const std::shared_ptr<CudaStream>& side_stream() const { return side_stream_; }
  /// Fills memory of the device that nobody uses, and returns when that is done.
  void fill(void* memory, int value, int64_t bytes);

  /// From now on memory given back also waits for @p stream.
  void watch(const std::shared_ptr<CudaStream>& stream);
  /// @p stream is about to end; what it still does counts until it is done.
  void unwatch(CudaStream& stream) noexcept;

  /// Marks the stream as StreamMarks::mark() does.
  std::shared_ptr<StreamMarks::Mark> mark() { return marks_.mark(); }
  /// Returns StreamMarks::has_passed(). @throws CudaError  also at exit.
  bool has_passed(StreamMarks::Mark& mark);
  /// Returns whether no stream that a pool of this process knows has work. @throws CudaError  also
  /// at exit.
  static bool are_all_idle();

 private:
  using Block = heap::WindowAllocator::Block;

  /// Memory that was taken of one kind.
  struct Arena {
    std::mutex growth_mutex;  ///< held while the driver is asked for more
    std::atomic<uint64_t> reserved_bytes{0};
    std::mutex mutex;  ///< guards what follows; nothing waits under it
    heap::WindowAllocator allocator;
    std::vector<std::byte*> pieces;
    RetiredBlocks retired;
  };

  explicit MemoryPool(int device_idx);
  Arena& arena(MemoryKind kind) { return arenas_[static_cast<size_t>(kind)]; }
  std::byte* make(MemoryKind kind, uint64_t bytes) const;
  void grow(MemoryKind kind, uint64_t bytes);
  void reclaim(Arena& arena);
  Block* take(MemoryKind kind, uint64_t bytes, std::byte** data);
  void give_back(MemoryKind kind, Block* block) noexcept;

  int device_idx_;
  std::shared_ptr<CudaStream> side_stream_;
  StreamMarks marks_;
  Arena arenas_[2];  ///< by kind
};

}  // namespace moe::cuda
