#include "cuda/cuda_heap.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/device_segment.h"
#include "cuda/driver.h"
#include "cuda/retired_blocks.h"
#include "heap/heap_core.h"
#include "heap/heap_window.h"
#include "heap/segment_size.h"

namespace moe::cuda {
namespace {

using Block = heap::WindowAllocator::Block;
using End = heap::WindowAllocator::End;
using heap::HeapCore;
using heap::HeapOptions;
using heap::HeapStats;
using heap::HeapWindow;
using heap::round_up;
using heap::SegmentTable;
using heap::Token;

// For streams to come to the end of what used a window.
constexpr auto kRetiredLimit = std::chrono::seconds(5);

/// Segments that this process has mapped, its own and its peers': ranks that are threads share
/// them.
struct ProcessSegments {
  /// Heap, number, and the device that alone reaches the mapping; kAnyDevice where allow() opens it
  /// to others.
  using Key = std::tuple<Token, uint32_t, int>;
  static constexpr int kAnyDevice = -1;

  std::mutex mutex;
  Token token = heap::random_token();
  std::map<Key, std::weak_ptr<DeviceSegment>> segments;

  static ProcessSegments& get() {
    static auto* instance = new ProcessSegments;  // threads may use it during exit
    return *instance;
  }
};

/// Memory of heaps that are gone, which kernels may still use. Kept for ever where nobody makes or
/// ends another heap: the process then ends, or does without it.
///
/// Unmapping may wait for every kernel of the process (cuMemUnmap is "synchronous for most use
/// cases"), and one of them for what this thread does next: so it has to wait until none runs.
class RetiredMemory {
 public:
  static RetiredMemory& get() {
    static auto* instance = new RetiredMemory;
    return *instance;
  }

  void add(std::vector<std::shared_ptr<DeviceSegment>> segments) {
    {
      const std::lock_guard lock(mutex_);
      graves_.insert(graves_.end(), segments.begin(), segments.end());
    }
    segments.clear();
    clear();
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    if (!graves_.empty() && MemoryPool::are_all_idle())
      graves_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<DeviceSegment>> graves_;
};

/// Windows that are given back may still be in use by what streams hold: their blocks are free once
/// that has ended.
struct CudaCore : HeapCore {
  std::shared_ptr<CudaDevice> device;
  std::vector<std::shared_ptr<DeviceSegment>> own;  ///< under memory_mutex
  std::mutex retired_mutex;
  RetiredBlocks retired;
  std::atomic<uint64_t> retired_bytes{0};

  ~CudaCore() {
    if (origin.is_forked_child() || own.empty())
      return;
    try {
      RetiredMemory::get().add(std::move(own));
    } catch (...) {  // the process is exiting: the driver takes the memory, which lies in its grave
    }
  }

  void release(Block* block) noexcept {
    if (block == nullptr || origin.is_forked_child())
      return;
    try {
      auto mark = device->pool().mark();
      const std::lock_guard lock(retired_mutex);
      retired.add(block, std::move(mark));
      retired_bytes.fetch_add(block->bytes, std::memory_order_relaxed);
    } catch (...) {  // the machine has no memory to note it in: nobody will use it again
    }
  }

  /// Begins, by segment, of the bytes of its range that are there with it and those before.
  heap::SegmentTable starts;

  bool holds(uint32_t segment_idx, uint64_t offset, uint64_t bytes) const {
    const uint64_t end = table.find(segment_idx)->bytes;
    return starts.find(segment_idx)->bytes <= offset && offset <= end && bytes <= end - offset;
  }
  /// Names the segment with which the block is there whole: who has opened it has opened those
  /// before.
  Offer offer_of(const Block& block, uint64_t bytes) const {
    uint32_t idx = block.segment_idx;
    while (!holds(idx, block.offset, bytes))
      ++idx;
    return {idx, 0, block.offset, bytes};
  }
  bool find(const void* address, uint64_t bytes, Offer* offer) const {
    const uint32_t num_known = num_segments.load(std::memory_order_acquire);
    for (uint32_t idx = 0; idx < num_known; ++idx) {
      const auto base = reinterpret_cast<uintptr_t>(table.find(idx)->data.load());
      const auto wanted = reinterpret_cast<uintptr_t>(address);
      if (wanted < base || !holds(idx, wanted - base, bytes))
        continue;
      *offer = Offer{idx, 0, wanted - base, bytes};
      return true;
    }
    return false;
  }

  /// Null where nothing free is that large.
  Block* allocate(uint64_t bytes) {
    const auto lock = lock_with_nodes();
    return bytes == 0 || bytes > kMostBytes ? nullptr : allocator.allocate(bytes);
  }

  /// Frees blocks whose work has ended. @return Whether some are left.
  bool reclaim() {
    const std::lock_guard lock(retired_mutex);
    retired.reclaim([this](StreamMarks::Mark& mark) { return device->pool().has_passed(mark); },
                    [this](Block* block) {
                      retired_bytes.fetch_sub(block->bytes, std::memory_order_relaxed);
                      HeapCore::release(block);
                    });
    return !retired.is_empty();
  }

  /// Throws @p error, which is being handled, with where memory is that its user believes to be
  /// free.
  [[noreturn]] void throw_with_retired(const CapacityError& error) const {
    const uint64_t bytes = retired_bytes.load(std::memory_order_relaxed);
    if (bytes == 0)
      throw;
    throw CapacityError(concat(error.what(),
                               ", of which ",
                               bytes,
                               " were given back and are still held, after ",
                               kRetiredLimit.count(),
                               " s, by work that was in the streams of this process by then"),
                        error.needed_bytes,
                        error.available_bytes);
  }
};

using CudaWindow = HeapWindow<CudaCore>;

/// Memory that one peer announced and this process has opened.
struct PeerMemory {
  SegmentTable table;
  std::vector<std::shared_ptr<DeviceSegment>> segments;
  std::string error;  ///< valid once has_error is seen
  std::atomic<bool> has_error{false};
};

class IpcHeap final : public CudaHeap, public std::enable_shared_from_this<IpcHeap> {
 public:
  IpcHeap(std::shared_ptr<heap::PeerMesh> mesh,
          std::shared_ptr<CudaDevice> device,
          const HeapOptions& options)
      : mesh_(std::move(mesh)),
        rank_idx_(mesh_->rank_idx()),
        token_(heap::random_token()),
        core_(std::make_shared<CudaCore>()) {
    MOE_CHECK(rank_idx_ >= 0, "the mesh of a heap must be connected, its rank is ", rank_idx_);
    core_->options = options;
    core_->device = std::move(device);
    granularity_ = segment_granularity(core_->device->device_idx());
    for (int i = 0; i < mesh_->num_ranks(); ++i)
      peers_.push_back(std::make_unique<PeerMemory>());
  }
  ~IpcHeap() override {
    if (listener_id_ >= 0)
      mesh_->remove_listener(listener_id_);
    try {
      std::vector<std::shared_ptr<DeviceSegment>> opened;
      for (const auto& peer : peers_)
        opened.insert(opened.end(), peer->segments.begin(), peer->segments.end());
      if (!opened.empty() && !core_->origin.is_forked_child())
        RetiredMemory::get().add(std::move(opened));
    } catch (...) {  // as in ~CudaCore
    }
  }

  /// Announcements are opened from now on, by the mesh's service thread.
  void listen() {
    listener_id_ = mesh_->add_listener([weak = weak_from_this()] {
      if (const auto self = weak.lock())
        self->open_announced();
    });
    open_announced();
  }

  std::shared_ptr<Window> allocate(uint64_t bytes) override;
  std::shared_ptr<Window> allocate_free(uint64_t most_bytes) override;
  std::byte* try_resolve(int rank_idx, const Offer& offer) override;
  bool find(const void* address, uint64_t bytes, Offer* offer) const override {
    core_->origin.check("the heap");
    return core_->find(address, bytes, offer);
  }
  uint64_t available_bytes() const override;
  uint64_t largest_available_bytes() const override;
  void end_quarantine() override {
    core_->origin.check("the heap");
    const std::lock_guard lock(core_->mutex);
    core_->allocator.end_quarantine();
  }
  void reserve(uint64_t bytes) override;
  HeapStats stats() const override;
  std::string sharing() const override {
    const std::lock_guard lock(core_->memory_mutex);
    return core_->own.empty() ? "" : sharing_name(sharing_);
  }

 private:
  void add_segment(uint64_t bytes);
  struct Growth {
    uint64_t bytes;  ///< at least
    std::shared_ptr<AddressRange> range;
    End end;
  };
  Growth plan_growth(uint64_t bytes);
  NewDeviceSegment make_segment(const Growth& growth, uint64_t wanted_bytes) const;
  Block* await_retired(uint64_t bytes);
  std::shared_ptr<Window> make_window(Block* block, uint64_t bytes);
  void open_announced();
  void open(int rank_idx, const heap::AnnouncedMemory& memory);
  std::shared_ptr<DeviceSegment> open_once(const heap::AnnouncedMemory& memory);

  std::shared_ptr<heap::PeerMesh> mesh_;
  int rank_idx_;
  Token token_;
  uint64_t granularity_ = 0;
  std::shared_ptr<CudaCore> core_;
  Sharing sharing_ = Sharing::kFileDescriptor;
  uint32_t first_of_range_ = 0;  ///< first segment in the range of the last one; memory_mutex
  std::atomic<uint64_t> num_growths_{0};

  std::mutex open_mutex_;
  std::vector<std::unique_ptr<PeerMemory>> peers_;
  std::atomic<uint64_t> peer_bytes_{0};
  int listener_id_ = -1;
};

uint64_t IpcHeap::available_bytes() const {
  core_->origin.check("the heap");
  const uint64_t growth = core_->growth_bytes();
  const std::lock_guard lock(core_->mutex);
  const uint64_t free_bytes =
      core_->allocator.counters().free_bytes + core_->retired_bytes.load(std::memory_order_relaxed);
  return growth > std::numeric_limits<uint64_t>::max() - free_bytes ? growth : free_bytes + growth;
}

uint64_t IpcHeap::largest_available_bytes() const {
  core_->origin.check("the heap");
  core_->reclaim();
  const uint64_t growth = core_->growth_bytes();
  const std::lock_guard lock(core_->mutex);
  return std::max(growth, core_->allocator.largest_free_bytes());
}

/// Memory of @p wanted_bytes, or of less where the device or the range has no more.
NewDeviceSegment IpcHeap::make_segment(const Growth& growth, uint64_t wanted_bytes) const {
  const auto make = [&](uint64_t bytes) {
    uint64_t offset = 0;
    if (growth.range != nullptr) {
      const auto last_idx = static_cast<uint32_t>(core_->own.size() - 1);
      offset = growth.end == End::kUpper ? core_->table.find(last_idx)->bytes
                                         : core_->starts.find(last_idx)->bytes - bytes;
    }
    return create_device_segment(core_->device->device_idx(), bytes, growth.range, offset);
  };
  if (wanted_bytes > growth.bytes) {
    try {
      return make(wanted_bytes);
    } catch (const std::exception&) {  // less may do
    }
  }
  return make(growth.bytes);
}

/// Places a segment for a window of @p bytes: at the end of the range where less is missing, as
/// what is free there counts; else to a range of its own.
IpcHeap::Growth IpcHeap::plan_growth(uint64_t bytes) {
  Growth growth{round_up(heap::WindowAllocator::rounded_bytes(bytes), granularity_), nullptr, {}};
  if (core_->own.empty() || core_->own.back()->range() == nullptr)
    return growth;
  const std::shared_ptr<AddressRange>& range = core_->own.back()->range();
  const auto last_idx = static_cast<uint32_t>(core_->own.size() - 1);
  const uint64_t room[] = {core_->starts.find(last_idx)->bytes,
                           range->bytes() - core_->table.find(last_idx)->bytes};
  const std::lock_guard lock(core_->mutex);
  for (const End end : {End::kUpper, End::kLower}) {
    const uint64_t missing =
        round_up(core_->allocator.missing_bytes(first_of_range_, bytes, end), granularity_);
    if (missing <= room[static_cast<size_t>(end)] &&
        (growth.range == nullptr || missing < growth.bytes))
      growth = {missing, range, end};
  }
  return growth;
}

/// Adds memory for a window of @p window_bytes. The caller holds memory_mutex.
void IpcHeap::add_segment(uint64_t window_bytes) {
  Growth growth = plan_growth(window_bytes);
  if (growth.bytes == 0)
    return;  // given back meanwhile
  const uint64_t room_bytes = core_->growth_bytes() / granularity_ * granularity_;
  if (growth.bytes > room_bytes)
    throw CapacityError(concat("the device heap of rank ",
                               rank_idx_,
                               " cannot hold a window of ",
                               window_bytes,
                               " bytes: its limit is ",
                               core_->options.limit_bytes,
                               " bytes, segments take ",
                               core_->segment_bytes.load(std::memory_order_relaxed)),
                        window_bytes,
                        room_bytes);
  const uint32_t segment_idx = core_->num_segments.load(std::memory_order_relaxed);
  const uint64_t wanted_bytes = core_->segment_bytes.load(std::memory_order_relaxed) /
                                heap::kDeviceGrowthDivisor * segment_idx;
  NewDeviceSegment made =
      make_segment(growth, std::min(round_up(wanted_bytes, granularity_), room_bytes));
  const uint64_t bytes = made.segment->bytes();
  ProcessSegments& process = ProcessSegments::get();
  {
    const std::lock_guard lock(process.mutex);
    process.segments[{token_, segment_idx, ProcessSegments::kAnyDevice}] = made.segment;
    made.description.process_token = process.token;
  }
  made.description.heap_token = token_;
  const std::string& uuid = core_->device->info().uuid;
  std::copy_n(uuid.begin(),
              std::min(uuid.size(), made.description.device_uuid.size()),
              made.description.device_uuid.begin());
  sharing_ = made.description.sharing;
  core_->own.push_back(made.segment);
  const bool is_beside = made.segment->range() != nullptr && made.description.begins_range == 0;
  const auto former = [&](const SegmentTable& table) { return table.find(segment_idx - 1)->bytes; };
  core_->starts.publish(
      segment_idx,
      made.segment->base(),
      is_beside ? std::min(former(core_->starts), made.segment->offset()) : made.segment->offset());
  core_->table.publish(
      segment_idx,
      made.segment->base(),
      is_beside ? std::max(former(core_->table), made.segment->end()) : made.segment->end());
  core_->num_segments.store(segment_idx + 1, std::memory_order_release);
  core_->segment_bytes.fetch_add(bytes, std::memory_order_relaxed);
  mesh_->announce_memory({segment_idx, bytes, made.description.to_bytes(), std::move(made.fd)});
  const auto lock = core_->lock_with_nodes();
  if (is_beside) {
    core_->allocator.extend(first_of_range_, bytes, growth.end);
  } else {
    first_of_range_ = segment_idx;
    core_->allocator.add_segment(segment_idx, bytes, made.segment->offset());
  }
}

std::shared_ptr<Window> IpcHeap::allocate(uint64_t bytes) {
  core_->origin.check("the heap");
  if (bytes == 0)
    return std::make_shared<CudaWindow>(core_, nullptr, nullptr, Offer{});
  if (bytes > HeapCore::kMostBytes)
    throw CapacityError(concat("a window of ", bytes, " bytes is beyond any device"), bytes, 0);
  const auto try_allocate = [&] {
    Block* const block = core_->allocate(bytes);
    if (block != nullptr)
      return block;
    // Asking the streams costs more than what is free already.
    core_->reclaim();
    return core_->allocate(bytes);
  };
  Block* block = try_allocate();
  if (block == nullptr) {
    const std::lock_guard memory_lock(core_->memory_mutex);
    // Another thread may have added memory meanwhile, or take what is added here.
    while ((block = try_allocate()) == nullptr) {
      try {
        add_segment(bytes);
        num_growths_.fetch_add(1, std::memory_order_relaxed);
      } catch (const CapacityError& error) {
        // Blocks that were given back are free once the streams come to it: no lack of memory.
        block = await_retired(bytes);
        if (block == nullptr)
          core_->throw_with_retired(error);
        break;
      }
    }
  }
  return make_window(block, bytes);
}

/// A block among those that streams are about to free; null where none is large enough, or the
/// streams take too long.
Block* IpcHeap::await_retired(uint64_t bytes) {
  const auto deadline = std::chrono::steady_clock::now() + kRetiredLimit;
  bool is_more_to_come = true;
  while (is_more_to_come && std::chrono::steady_clock::now() < deadline) {
    is_more_to_come = core_->reclaim();
    if (Block* block = core_->allocate(bytes))
      return block;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return nullptr;
}

std::shared_ptr<Window> IpcHeap::allocate_free(uint64_t most_bytes) {
  core_->origin.check("the heap");
  Block* block = core_->allocate(most_bytes);
  if (block == nullptr) {
    core_->reclaim();
    block = core_->allocate_largest(most_bytes);
  }
  if (block == nullptr)
    return nullptr;
  return make_window(block, std::min(most_bytes, block->bytes));
}

std::shared_ptr<Window> IpcHeap::make_window(Block* block, uint64_t bytes) {
  auto window = CudaWindow::over(core_, block, bytes);
  // Before anybody else hears of the window.
  if (core_->options.poison)
    core_->device->pool().fill(window->data(), 0xFF, static_cast<int64_t>(block->bytes));
  return window;
}

std::byte* IpcHeap::try_resolve(int rank_idx, const Offer& offer) {
  core_->origin.check("the heap");
  if (offer.bytes == 0)
    return heap::empty_window_address();
  MOE_CHECK(rank_idx >= 0 && rank_idx < mesh_->num_ranks(),
            "rank ",
            rank_idx,
            " is not in [0, ",
            mesh_->num_ranks(),
            ")");
  const PeerMemory& peer = *peers_[static_cast<size_t>(rank_idx)];
  const SegmentTable::Entry* entry = rank_idx == rank_idx_ ? core_->table.find(offer.segment_idx)
                                                           : peer.table.find(offer.segment_idx);
  if (entry != nullptr)
    return heap::place_in(*entry, rank_idx, offer);
  if (peer.has_error.load(std::memory_order_acquire)) [[unlikely]]
    throw CudaError(peer.error, cudaErrorUnknown);
  return nullptr;
}

void IpcHeap::reserve(uint64_t bytes) {
  core_->origin.check("the heap");
  if (bytes > HeapCore::kMostBytes)
    throw CapacityError(concat("a segment of ", bytes, " bytes is beyond any device"), bytes, 0);
  const std::lock_guard memory_lock(core_->memory_mutex);
  {
    const std::lock_guard lock(core_->mutex);
    if (core_->allocator.largest_free_bytes() >= bytes)
      return;
  }
  add_segment(bytes);
}

HeapStats IpcHeap::stats() const {
  core_->origin.check("the heap");
  HeapStats stats;
  stats.num_growths = num_growths_.load(std::memory_order_relaxed);
  stats.peer_segment_bytes = peer_bytes_.load(std::memory_order_relaxed);
  stats.num_segments = core_->num_segments.load(std::memory_order_relaxed);
  stats.segment_bytes = core_->segment_bytes.load(std::memory_order_relaxed);
  stats.resident_bytes = stats.segment_bytes;
  const std::lock_guard lock(core_->mutex);
  const heap::WindowAllocator::Counters& counters = core_->allocator.counters();
  stats.live_bytes = counters.live_bytes;
  stats.quarantined_bytes = counters.quarantined_bytes;
  stats.peak_live_bytes = counters.peak_live_bytes;
  stats.num_windows = counters.num_live;
  stats.num_allocations = counters.num_allocations;
  return stats;
}

void IpcHeap::open_announced() {
  const std::lock_guard lock(open_mutex_);
  for (int rank_idx = 0; rank_idx < mesh_->num_ranks(); ++rank_idx) {
    heap::AnnouncedMemory memory;
    while (mesh_->take_memory(rank_idx, &memory))
      open(rank_idx, memory);
  }
}

/// A failure is kept for the call that needs the segment, which can say so.
void IpcHeap::open(int rank_idx, const heap::AnnouncedMemory& memory) {
  PeerMemory& peer = *peers_[static_cast<size_t>(rank_idx)];
  try {
    const std::shared_ptr<DeviceSegment> segment = open_once(memory);
    if (segment == nullptr)
      return;  // its heap is gone, and with it everything that was offered there
    peer.segments.push_back(segment);
    const SegmentTable::Entry* const former =
        memory.segment_idx == 0 ? nullptr : peer.table.find(memory.segment_idx - 1);
    const bool is_beside = former != nullptr && former->data.load() == segment->base();
    peer.table.publish(memory.segment_idx,
                       segment->base(),
                       is_beside ? std::max(former->bytes, segment->end()) : segment->end());
    peer_bytes_.fetch_add(segment->bytes(), std::memory_order_relaxed);
  } catch (const std::exception& error) {
    if (peer.has_error.load(std::memory_order_relaxed))
      return;
    peer.error = concat("segment ",
                        memory.segment_idx,
                        " of rank ",
                        rank_idx,
                        " cannot be opened on rank ",
                        rank_idx_,
                        ": ",
                        error.what());
    peer.has_error.store(true, std::memory_order_release);
  }
}

std::shared_ptr<DeviceSegment> IpcHeap::open_once(const heap::AnnouncedMemory& memory) {
  const SegmentDescription description = SegmentDescription::from_bytes(memory.description);
  const int device_idx = core_->device->device_idx();
  ProcessSegments& process = ProcessSegments::get();
  const std::lock_guard lock(process.mutex);
  std::erase_if(process.segments, [](const auto& entry) { return entry.second.expired(); });
  const bool is_foreign = description.process_token != process.token;
  const bool is_by_device = is_foreign && description.sharing == Sharing::kIpc;
  const auto mapping = [&](uint32_t segment_idx) -> std::weak_ptr<DeviceSegment>& {
    return process.segments[{description.heap_token,
                             segment_idx,
                             is_by_device ? device_idx : ProcessSegments::kAnyDevice}];
  };
  std::shared_ptr<DeviceSegment> segment = mapping(memory.segment_idx).lock();
  if (segment == nullptr && !is_foreign)
    return nullptr;
  if (segment == nullptr) {
    const auto last = mapping(memory.segment_idx - 1).lock();
    segment = open_device_segment(description,
                                  memory.fd == nullptr ? -1 : memory.fd->get(),
                                  memory.bytes,
                                  device_idx,
                                  last == nullptr ? nullptr : last->range());
    mapping(memory.segment_idx) = segment;
  }
  segment->allow(device_idx);
  return segment;
}

}  // namespace

std::shared_ptr<CudaHeap> CudaHeap::create(std::shared_ptr<heap::PeerMesh> mesh,
                                           std::shared_ptr<CudaDevice> device,
                                           const HeapOptions& options) {
  RetiredMemory::get().clear();
  auto made = std::make_shared<IpcHeap>(std::move(mesh), std::move(device), options);
  made->listen();
  return made;
}

}  // namespace moe::cuda
