#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/cuda_stream.h"
#include "runtime/stream_marks.h"

namespace moe::cuda {

enum class MemoryKind { kDevice, kHost };

using runtime::StreamMarks;

/// Memory of one device that is reused, never returned: cudaFree waits for every stream of the
/// process, and one of them may wait for what this thread does next.
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

  /// For copies and fills that wait for nothing, so that all ranks of this process can share it.
  const std::shared_ptr<CudaStream>& side_stream() const { return side_stream_; }
  /// Fills memory of the device that nobody uses, and returns when that is done.
  void fill(void* memory, int value, int64_t bytes);

  /// From now on memory given back also waits for @p stream.
  void watch(const std::shared_ptr<CudaStream>& stream);
  /// @p stream is about to end; what it still does counts until it is done.
  void unwatch(CudaStream& stream) noexcept;

  /// As StreamMarks::mark().
  std::shared_ptr<StreamMarks::Mark> mark() { return marks_.mark(); }
  /// As StreamMarks::has_passed(). @throws CudaError  also at exit.
  bool has_passed(StreamMarks::Mark& mark);

 private:
  struct Block {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
    std::shared_ptr<StreamMarks::Mark> mark;  ///< once it has passed it may be used again
  };

  explicit MemoryPool(int device_idx);
  Block make(MemoryKind kind, uint64_t bytes);
  bool take(MemoryKind kind, uint64_t bytes, Block* block);
  void give_back(MemoryKind kind, Block block) noexcept;
  void zero(MemoryKind kind, const Block& block);

  int device_idx_;
  std::shared_ptr<CudaStream> side_stream_;
  StreamMarks marks_;
  std::mutex mutex_;
  std::multimap<uint64_t, Block> free_[2];  ///< by kind, by bytes
};

}  // namespace moe::cuda
