#include "heap/shm_heap.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/process.h"
#include "heap/heap_core.h"
#include "heap/heap_window.h"
#include "heap/huge_pages.h"
#include "heap/machine_memory.h"
#include "heap/memfd_segment.h"
#include "heap/segment_size.h"
#include "heap/segment_table.h"
#include "heap/window_allocator.h"

namespace moe::heap {
namespace {

using Block = WindowAllocator::Block;
using ShmWindow = HeapWindow<HeapCore>;

uint64_t round_down(uint64_t value, uint64_t multiple) {
  return value / multiple * multiple;
}

class MemfdHeap final : public ShmHeap {
 public:
  MemfdHeap(std::shared_ptr<PeerMesh> mesh, const HeapOptions& options)
      : mesh_(std::move(mesh)), rank_idx_(mesh_->rank_idx()), core_(std::make_shared<HeapCore>()) {
    MOE_CHECK(rank_idx_ >= 0, "the mesh of a heap must be connected, its rank is ", rank_idx_);
    core_->options = options;
  }

  std::shared_ptr<Window> allocate(uint64_t bytes) override;
  std::shared_ptr<Window> allocate_free(uint64_t most_bytes) override;
  std::byte* try_resolve(int rank_idx, const Offer& offer) override;
  bool find(const void* address, uint64_t bytes, Offer* offer) const override;
  std::shared_ptr<SharedPages> find_shared(const void* address, uint64_t bytes) const override;
  uint64_t num_shared() const override { return num_shared_.load(std::memory_order_acquire); }
  uint64_t available_bytes() const override;
  uint64_t largest_available_bytes() const override;
  void end_quarantine() override;
  void reserve(uint64_t bytes) override;
  std::vector<std::shared_ptr<HeapPages>> share(const std::vector<MemoryRange>& ranges) override;
  uint64_t trim() override;
  HeapStats stats(bool verify_huge_pages) const override;

 private:
  uint64_t largest_free_bytes() const;
  uint64_t return_free_pages();
  void add_segment(uint64_t least_bytes, uint64_t wanted_bytes);
  std::shared_ptr<Window> make_window(Block* block, uint64_t bytes);
  void warm(const Block& block);

  std::shared_ptr<PeerMesh> mesh_;
  int rank_idx_;
  std::shared_ptr<HeapCore> core_;
  std::atomic<uint64_t> num_growths_{0};
  mutable sync::Mutex shared_mutex_;
  std::map<uintptr_t, std::weak_ptr<HeapPages>> shared_;  ///< by address
  std::atomic<uint64_t> num_shared_{0};
};

uint64_t MemfdHeap::available_bytes() const {
  core_->origin.check("the heap");
  // Asked once per operation: what the machine has left would cost more to read than to move rows.
  const uint64_t growth = core_->growth_bytes();
  const std::lock_guard lock(core_->mutex);
  const uint64_t cold_bytes = core_->cold_bytes.load(std::memory_order_relaxed);
  const uint64_t all_free_bytes = core_->allocator.counters().free_bytes;
  // Cold memory counts against the limit when it is used again.
  const uint64_t free_bytes = all_free_bytes - std::min(all_free_bytes, cold_bytes);
  return growth > std::numeric_limits<uint64_t>::max() - free_bytes ? growth : free_bytes + growth;
}

uint64_t MemfdHeap::largest_available_bytes() const {
  core_->origin.check("the heap");
  const uint64_t growth = core_->growth_bytes();
  const uint64_t cold_bytes = core_->cold_bytes.load(std::memory_order_relaxed);
  const std::lock_guard lock(core_->mutex);
  // The largest free range may be cold, and its pages beyond the limit.
  const uint64_t largest_bytes = core_->allocator.largest_free_bytes();
  return std::max(growth, largest_bytes - std::min(largest_bytes, cold_bytes));
}

uint64_t MemfdHeap::largest_free_bytes() const {
  const std::lock_guard lock(core_->mutex);
  return core_->allocator.largest_free_bytes();
}

/// Adds a segment of @p wanted_bytes, or as little as @p least_bytes where no more can be had.
/// The caller holds memory_mutex.
void MemfdHeap::add_segment(uint64_t least_bytes, uint64_t wanted_bytes) {
  const uint64_t page_bytes = system_page_bytes();
  least_bytes = round_up(least_bytes, page_bytes);
  const uint64_t room_bytes = round_down(core_->growth_bytes(), page_bytes);
  if (least_bytes > room_bytes) {
    const uint64_t largest_bytes = largest_free_bytes();
    throw CapacityError(concat("the heap of rank ",
                               rank_idx_,
                               " cannot hold a window of ",
                               least_bytes,
                               " bytes: its limit is ",
                               core_->options.limit_bytes,
                               " bytes, segments take ",
                               core_->segment_bytes.load(std::memory_order_relaxed),
                               ", the largest free range has ",
                               largest_bytes),
                        least_bytes,
                        std::max(largest_bytes, room_bytes));
  }
  wanted_bytes = std::max(least_bytes, std::min(wanted_bytes, room_bytes));
  NewSegment made;
  try {
    made = create_segment(wanted_bytes, core_->options.with_huge_pages);
  } catch (const CapacityError&) {
    if (wanted_bytes == least_bytes)
      throw;
    made = create_segment(least_bytes, core_->options.with_huge_pages);
  }
  const uint64_t bytes = made.segment->bytes();
  auto segment = std::make_unique<OwnSegment>();
  segment->mapping = made.segment;
  segment->granule_bytes =
      made.huge_page_bytes > 0 ? kHugePageBytes : std::max(page_bytes, WindowAllocator::kPageBytes);
  segment->huge_page_bytes = made.huge_page_bytes;
  const uint32_t segment_idx = core_->num_segments.load(std::memory_order_relaxed);
  core_->table.publish(segment_idx, made.segment->data(), bytes);
  core_->num_segments.store(segment_idx + 1, std::memory_order_release);
  core_->segment_bytes.fetch_add(bytes, std::memory_order_relaxed);
  mesh_->announce_segment(segment_idx, made.segment, std::move(made.memfd));
  const auto lock = core_->lock_with_nodes();
  core_->segments.push_back(std::move(segment));
  core_->allocator.add_segment(segment_idx, bytes);
}

std::shared_ptr<Window> MemfdHeap::allocate(uint64_t bytes) {
  core_->origin.check("the heap");
  if (bytes == 0)
    return std::make_shared<ShmWindow>(core_, nullptr, nullptr, Offer{});
  if (bytes > HeapCore::kMostBytes)
    throw CapacityError(concat("a window of ", bytes, " bytes is beyond any machine"),
                        bytes,
                        machine_available_bytes());
  Block* block = nullptr;
  {
    const auto lock = core_->lock_with_nodes();
    block = core_->allocator.allocate(bytes);
  }
  if (block == nullptr) {
    const std::lock_guard memory_lock(core_->memory_mutex);
    const auto try_again = [&] {
      const auto lock = core_->lock_with_nodes();
      return core_->allocator.allocate(bytes);
    };
    // Another thread may have added memory meanwhile, or take what is added here.
    while ((block = try_again()) == nullptr) {
      const uint64_t wanted_bytes = bytes + headroom_bytes(bytes, largest_free_bytes());
      // Free memory is too small for this step's windows; later ones will hardly fit it either.
      return_free_pages();
      add_segment(WindowAllocator::rounded_bytes(bytes), round_up(wanted_bytes, kHugePageBytes));
      num_growths_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  return make_window(block, bytes);
}

std::shared_ptr<Window> MemfdHeap::allocate_free(uint64_t most_bytes) {
  core_->origin.check("the heap");
  Block* const block = core_->allocate_largest(most_bytes);
  if (block == nullptr)
    return nullptr;
  return make_window(block, std::min(most_bytes, block->bytes));
}

std::shared_ptr<Window> MemfdHeap::make_window(Block* block, uint64_t bytes) {
  auto window = ShmWindow::over(core_, block, bytes);
  warm(*block);
  if (core_->options.poison)
    std::memset(window->data(), 0xFF, block->bytes);
  return window;
}

/// Faults in what trim() returned of the granules under a block.
void MemfdHeap::warm(const Block& block) {
  OwnSegment* segment = nullptr;
  {
    const std::lock_guard lock(core_->mutex);
    segment = core_->segments[block.segment_idx].get();
  }
  if (segment->cold_bytes.load(std::memory_order_acquire) == 0)
    return;
  const std::lock_guard memory_lock(core_->memory_mutex);
  const uint64_t start = round_down(block.offset, segment->granule_bytes);
  const uint64_t end = std::min(round_up(block.offset + block.bytes, segment->granule_bytes),
                                segment->mapping->bytes());
  const auto cold_ranges = segment->cold.overlapping(start, end);
  uint64_t cold_bytes = 0;
  for (const RangeSet::Range& range : cold_ranges)
    cold_bytes += range.bytes();
  if (cold_bytes > core_->growth_bytes()) {
    return_free_pages();
    if (cold_bytes > core_->growth_bytes())
      throw CapacityError(concat("the heap of rank ",
                                 rank_idx_,
                                 " cannot hold a window of ",
                                 block.bytes,
                                 " bytes: its limit is ",
                                 core_->options.limit_bytes,
                                 " bytes, of which ",
                                 core_->growth_bytes(),
                                 " are left"),
                          block.bytes,
                          core_->growth_bytes());
  }
  for (const RangeSet::Range& range : cold_ranges) {
    const uint64_t huge_bytes =
        fault_in(segment->mapping->data() + range.start, range.bytes(), segment->has_huge_pages());
    segment->cold.erase(range.start, range.end);
    segment->cold_bytes.fetch_sub(range.bytes(), std::memory_order_release);
    core_->cold_bytes.fetch_sub(range.bytes(), std::memory_order_relaxed);
    segment->huge_page_bytes.fetch_add(huge_bytes, std::memory_order_relaxed);
  }
}

std::byte* MemfdHeap::try_resolve(int rank_idx, const Offer& offer) {
  core_->origin.check("the heap");
  if (offer.bytes == 0)
    return empty_window_address();
  const SegmentTable::Entry* entry = rank_idx == rank_idx_
                                         ? core_->table.find(offer.segment_idx)
                                         : mesh_->find_segment(rank_idx, offer.segment_idx);
  if (entry == nullptr)
    return nullptr;
  return place_in(*entry, rank_idx, offer);
}

bool MemfdHeap::find(const void* address, uint64_t bytes, Offer* offer) const {
  core_->origin.check("the heap");
  return core_->find(address, bytes, offer);
}

void MemfdHeap::end_quarantine() {
  core_->origin.check("the heap");
  const std::lock_guard lock(core_->mutex);
  core_->allocator.end_quarantine();
}

void MemfdHeap::reserve(uint64_t bytes) {
  core_->origin.check("the heap");
  if (bytes > HeapCore::kMostBytes)
    throw CapacityError(concat("a segment of ", bytes, " bytes is beyond any machine"),
                        bytes,
                        machine_available_bytes());
  const std::lock_guard memory_lock(core_->memory_mutex);
  if (largest_free_bytes() >= bytes)
    return;
  add_segment(WindowAllocator::rounded_bytes(bytes), round_up(bytes, kHugePageBytes));
}

std::vector<std::shared_ptr<HeapPages>> MemfdHeap::share(const std::vector<MemoryRange>& ranges) {
  core_->origin.check("the heap");
  std::vector<MemoryRange> pages;
  for (const MemoryRange& range : ranges)
    pages.push_back(whole_pages(range));
  check_private_memory(pages);
  std::vector<std::shared_ptr<HeapPages>> shared;
  uint64_t left_bytes = 0;
  for (const MemoryRange& range : ranges)
    left_bytes += WindowAllocator::rounded_bytes(HeapPages::heap_bytes(range));
  try {
    for (const MemoryRange& range : ranges) {
      const uint64_t bytes = HeapPages::heap_bytes(range);
      const uint64_t rounded_bytes = WindowAllocator::rounded_bytes(bytes);
      if (largest_free_bytes() < rounded_bytes)
        reserve(std::max(rounded_bytes, std::min(left_bytes, kShareStepBytes)));
      left_bytes -= rounded_bytes;
      shared.push_back(HeapPages::share(range, allocate(bytes)));
    }
  } catch (...) {
    for (const auto& each : shared)
      each->unshare();
    throw;
  }
  const std::lock_guard lock(shared_mutex_);
  std::erase_if(shared_, [](const auto& entry) {
    const auto pages = entry.second.lock();
    return !pages || !pages->window();
  });
  for (const auto& each : shared)
    shared_[reinterpret_cast<uintptr_t>(each->memory().data)] = each;
  num_shared_.fetch_add(shared.size(), std::memory_order_release);
  return shared;
}

std::shared_ptr<SharedPages> MemfdHeap::find_shared(const void* address, uint64_t bytes) const {
  const auto first = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(shared_mutex_);
  auto next = shared_.upper_bound(first);
  if (next == shared_.begin())
    return nullptr;
  const std::shared_ptr<HeapPages> found = std::prev(next)->second.lock();
  if (!found || first + bytes > reinterpret_cast<uintptr_t>(found->memory().end()) ||
      !found->window())
    return nullptr;
  return found;
}

uint64_t MemfdHeap::trim() {
  core_->origin.check("the heap");
  const std::lock_guard memory_lock(core_->memory_mutex);
  return return_free_pages();
}

/// The caller holds memory_mutex.
uint64_t MemfdHeap::return_free_pages() {
  std::vector<Block*> blocks;
  std::vector<OwnSegment*> segments;
  {
    const std::lock_guard lock(core_->mutex);
    blocks = core_->allocator.take_all_free();
    for (const auto& segment : core_->segments)
      segments.push_back(segment.get());
  }
  uint64_t returned_bytes = 0;
  for (const Block* block : blocks) {
    OwnSegment& segment = *segments[block->segment_idx];
    const uint64_t start = round_up(block->offset, segment.granule_bytes);
    uint64_t end = block->offset + block->bytes;
    if (end != segment.mapping->bytes())
      end = round_down(end, segment.granule_bytes);
    if (start >= end || !return_pages(segment.mapping->data() + start, end - start))
      continue;
    const uint64_t cooled_bytes = segment.cold.insert(start, end);
    segment.cold_bytes.fetch_add(cooled_bytes, std::memory_order_release);
    core_->cold_bytes.fetch_add(cooled_bytes, std::memory_order_relaxed);
    const uint64_t huge_bytes = segment.huge_page_bytes.load(std::memory_order_relaxed);
    segment.huge_page_bytes.store(huge_bytes - std::min(huge_bytes, cooled_bytes),
                                  std::memory_order_relaxed);
    returned_bytes += cooled_bytes;
  }
  const std::lock_guard lock(core_->mutex);
  for (Block* block : blocks)
    core_->allocator.put_back(block);
  return returned_bytes;
}

HeapStats MemfdHeap::stats(bool verify_huge_pages) const {
  core_->origin.check("the heap");
  HeapStats stats;
  stats.num_growths = num_growths_.load(std::memory_order_relaxed);
  stats.peer_segment_bytes = mesh_->peer_segment_bytes();
  std::vector<std::shared_ptr<Segment>> mappings;
  {
    const std::lock_guard lock(core_->mutex);
    const WindowAllocator::Counters& counters = core_->allocator.counters();
    stats.live_bytes = counters.live_bytes;
    stats.quarantined_bytes = counters.quarantined_bytes;
    stats.peak_live_bytes = counters.peak_live_bytes;
    stats.num_windows = counters.num_live;
    stats.num_allocations = counters.num_allocations;
    stats.num_segments = core_->segments.size();
    for (const auto& segment : core_->segments) {
      stats.segment_bytes += segment->mapping->bytes();
      stats.resident_bytes +=
          segment->mapping->bytes() - segment->cold_bytes.load(std::memory_order_relaxed);
      stats.huge_page_bytes += segment->huge_page_bytes.load(std::memory_order_relaxed);
      mappings.push_back(segment->mapping);
    }
  }
  if (verify_huge_pages) {
    stats.huge_page_bytes = 0;
    for (const auto& mapping : mappings)
      stats.huge_page_bytes += huge_page_bytes_in_smaps(mapping->data(), mapping->bytes());
  }
  return stats;
}

}  // namespace

std::shared_ptr<ShmHeap> ShmHeap::create(std::shared_ptr<PeerMesh> mesh,
                                         const HeapOptions& options) {
  return std::make_shared<MemfdHeap>(std::move(mesh), options);
}

}  // namespace moe::heap
