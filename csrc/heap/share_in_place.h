#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/symmetric_memory.h"
#include "core/sync.h"
#include "heap/fork_guard.h"

namespace moe::heap {

/// [data, data + bytes) of this process.
struct MemoryRange {
  std::byte* data = nullptr;
  uint64_t bytes = 0;

  std::byte* end() const { return data + bytes; }
};

/// The pages that lie whole in a range.
MemoryRange whole_pages(const MemoryRange& range);

/// Checks that every page of @p pages, in ascending order, is private to this process, writable,
/// and of no file. Reads /proc/self/maps once.
/// @throws InvalidArgument  of the first that is not.
void check_private_memory(const std::vector<MemoryRange>& pages);

/// Memory that was private to this process and now consists of pages of the heap, at the address
/// where it was. Absent in forked children, as the heap is.
class HeapPages final : public SharedPages {
 public:
  /// Abandons memory that is still shared.
  ~HeapPages() override { abandon(); }
  HeapPages(const HeapPages&) = delete;
  HeapPages& operator=(const HeapPages&) = delete;

  /// Copies the memory to @p window and has its whole pages show the window's. Nobody may write to
  /// it meanwhile.
  /// @param window  Window of heap_bytes(memory).
  /// @throws SystemError  The system refuses; the memory is what it was.
  static std::shared_ptr<HeapPages> share(const MemoryRange& memory,
                                          std::shared_ptr<Window> window);

  /// Bytes of the window that a range needs.
  static uint64_t heap_bytes(const MemoryRange& memory);

  /// Makes the memory private again, with its contents. Nobody may write to it meanwhile.
  /// @throws InvalidArgument  Peers are writing to it.
  /// @throws CapacityError, SystemError  The system refuses; the memory is still shared.
  void unshare();

  /// The owner has freed the memory, which may be anybody's by now: its pages are never used again.
  void abandon();

  const MemoryRange& memory() const { return memory_; }
  std::byte* in_heap(const std::byte* address) const override;
  std::shared_ptr<Window> window() const override;
  bool begin_writes() override;
  void end_writes(bool is_failed) override;

 private:
  HeapPages(const MemoryRange& memory, std::shared_ptr<Window> window);
  std::byte* place_of(const std::byte* address) const;
  template <typename Body>
  void for_edges(Body&& body) const;

  MemoryRange memory_;
  MemoryRange pages_;
  ForkOrigin origin_;
  mutable sync::Mutex mutex_;
  std::shared_ptr<Window> window_;
  int num_writers_ = 0;
};

}  // namespace moe::heap
