#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/sync.h"
#include "heap/fork_guard.h"
#include "heap/huge_pages.h"
#include "heap/memfd_segment.h"
#include "heap/range_set.h"
#include "heap/segment_table.h"
#include "heap/shm_heap.h"
#include "heap/window_allocator.h"

namespace moe::heap {

/// One segment of this rank. Which parts are cold (returned by trim()) is guarded by
/// HeapCore::memory_mutex.
struct OwnSegment {
  std::shared_ptr<Segment> mapping;
  uint64_t granule_bytes = 0;  ///< unit of trim(): what it returns starts and ends at multiples
  RangeSet cold;
  std::atomic<uint64_t> cold_bytes{0};
  std::atomic<uint64_t> huge_page_bytes{0};

  bool has_huge_pages() const { return granule_bytes == kHugePageBytes; }
};

/// State that windows keep alive: the memory and who holds which part of it. It knows no peers.
struct HeapCore {
  /// Above it sums of sizes and offsets could overflow.
  static constexpr uint64_t kMostBytes = uint64_t{1} << 47;

  ForkOrigin origin;
  HeapOptions options;

  // Held across system calls (growth, trim, faulting in); taken before `mutex`, never by a window.
  sync::Mutex memory_mutex;
  // Bookkeeping only.
  sync::Mutex mutex;
  WindowAllocator allocator;
  std::vector<std::unique_ptr<OwnSegment>> segments;

  // Read without a lock.
  SegmentTable table;
  std::atomic<uint32_t> num_segments{0};
  std::atomic<uint64_t> segment_bytes{0};
  std::atomic<uint64_t> cold_bytes{0};  ///< over all segments

  /// Locks `mutex` with enough spare nodes for one change, so that none are made under it.
  std::unique_lock<sync::Mutex> lock_with_nodes() {
    std::unique_lock lock(mutex);
    if (allocator.needs_nodes()) {
      lock.unlock();
      auto nodes = std::make_unique<WindowAllocator::Block[]>(WindowAllocator::kNodesPerChunk);
      lock.lock();
      allocator.add_nodes(std::move(nodes));
    }
    return lock;
  }

  /// Bytes of memory that the limit still allows. What trim() returned is none.
  uint64_t growth_bytes() const {
    if (options.limit_bytes == 0)
      return std::numeric_limits<uint64_t>::max();
    const uint64_t used =
        segment_bytes.load(std::memory_order_relaxed) - cold_bytes.load(std::memory_order_relaxed);
    return options.limit_bytes - std::min(options.limit_bytes, used);
  }

  /// The largest free block, of @p most_bytes at most; null where nothing is free.
  WindowAllocator::Block* allocate_largest(uint64_t most_bytes) {
    const auto lock = lock_with_nodes();
    return allocator.allocate_largest(std::min(most_bytes, kMostBytes));
  }

  /// Offer of the first @p bytes of a block.
  Offer offer_of(const WindowAllocator::Block& block, uint64_t bytes) const {
    return {block.segment_idx, 0, block.offset, bytes};
  }

  /// Returns whether [address, address + bytes) lies whole in one segment; if so sets @p offer.
  bool find(const void* address, uint64_t bytes, Offer* offer) const {
    const auto wanted = reinterpret_cast<uintptr_t>(address);
    for (uint32_t idx = num_segments.load(std::memory_order_acquire); idx-- > 0;) {
      const SegmentTable::Entry* entry = table.find(idx);
      const auto start = reinterpret_cast<uintptr_t>(entry->data.load(std::memory_order_relaxed));
      if (wanted < start || wanted - start > entry->bytes ||
          bytes > entry->bytes - (wanted - start))
        continue;
      *offer = Offer{idx, 0, wanted - start, bytes};
      return true;
    }
    return false;
  }

  void release(WindowAllocator::Block* block) noexcept {
    if (block == nullptr || origin.is_forked_child())
      return;  // in a child the mutex may be held for ever by a thread that is not there
    const std::lock_guard lock(mutex);
    allocator.free(block);
  }
};

}  // namespace moe::heap
