#include "schedules/host_heap.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/math.h"

namespace moe::simt::checker {

namespace {

using heap::HeapCore;
using heap::WindowAllocator;

constexpr int kWindowPoison = 0xA5;

/// As the windows of the real heap, and tells the checker which bytes are in use.
class WorldWindow final : public Window {
 public:
  WorldWindow(HostThreads& threads,
              std::shared_ptr<HeapCore> core,
              std::shared_ptr<SetAside> aside,
              WindowAllocator::Block* block,
              std::byte* data,
              const Offer& offer)
      : threads_(threads), core_(std::move(core)), aside_(std::move(aside)), block_(block) {
    data_ = data;
    offer_ = offer;
    if (block_ == nullptr || !threads_.step_quietly())
      return;
    threads_.memory().allocate(threads_.thread(), data_, offer_.bytes);
    std::memset(data_, kWindowPoison, offer_.bytes);
  }

  ~WorldWindow() override {
    if (block_ != nullptr)
      release_bytes(0);
    core_->release(block_);
  }

  void shrink(uint64_t bytes) override {
    MOE_CHECK(bytes <= offer_.bytes, "shrink() to ", bytes, " bytes of a window of ", offer_.bytes);
    if (block_ == nullptr)
      return;
    release_bytes(bytes);
    const auto lock = core_->lock_with_nodes();
    core_->allocator.shrink(block_, bytes);
    offer_.bytes = bytes;
  }

  void quarantine() override {
    if (block_ == nullptr)
      return;
    quarantine_round_ = aside_->round;
    const std::lock_guard lock(core_->mutex);
    core_->allocator.quarantine(block_);
  }

 private:
  void release_bytes(uint64_t kept_bytes) {
    kept_bytes = std::min((kept_bytes + 3) / 4 * 4, offer_.bytes);  // the checker looks at words
    if (quarantine_round_ == aside_->round)
      aside_->ranges.emplace_back(data_ + kept_bytes, offer_.bytes - kept_bytes);
    else if (HostThreads::current() != nullptr && threads_.step_quietly())
      threads_.memory().free(threads_.thread(), data_ + kept_bytes, offer_.bytes - kept_bytes);
  }

  HostThreads& threads_;
  std::shared_ptr<HeapCore> core_;
  std::shared_ptr<SetAside> aside_;
  WindowAllocator::Block* block_;
  uint64_t quarantine_round_ = 0;
};

}  // namespace

WorldHeap::WorldHeap(HostWorld& world, int rank_idx)
    : world_(world),
      rank_idx_(rank_idx),
      core_(std::make_shared<HeapCore>()),
      aside_(std::make_shared<SetAside>()) {
  constexpr int64_t kPage = WindowAllocator::kPageBytes;
  part_bytes_ = static_cast<uint64_t>(HostMemory::kArenaBytes / world.num_ranks() / kPage * kPage);
  const uint64_t place = part_bytes_ * static_cast<uint64_t>(rank_idx);
  part_bytes_ = std::min(part_bytes_, static_cast<uint64_t>(world.options().most_heap_bytes));
  part_begin_ = world.threads().memory().arena() + place;
}

bool WorldHeap::grow(uint64_t bytes) {
  constexpr int64_t kPage = WindowAllocator::kPageBytes;
  const auto wanted = static_cast<uint64_t>(
      round_up(std::max(static_cast<int64_t>(bytes), world_.options().segment_bytes), kPage));
  if (wanted > part_bytes_ - num_used_bytes_)
    return false;
  const OwnPart segment{part_begin_ + num_used_bytes_, wanted};
  num_used_bytes_ += wanted;
  const auto segment_idx = static_cast<uint32_t>(segments_.size());
  segments_.push_back(segment);
  HostThreads& threads = world_.threads();
  if (threads.step_quietly()) {
    WorldLink::News news;
    news.event = WorldLink::Event::kSegment;
    news.begin = segment.begin;
    news.bytes = segment.bytes;
    news.known = threads.memory().close(threads.thread());
    world_.link(rank_idx_).tell_peers(std::move(news));
  }
  const auto lock = core_->lock_with_nodes();
  core_->allocator.add_segment(segment_idx, segment.bytes);
  return true;
}

std::shared_ptr<Window> WorldHeap::make_window(WindowAllocator::Block* block, uint64_t bytes) {
  return std::make_shared<WorldWindow>(world_.threads(),
                                       core_,
                                       aside_,
                                       block,
                                       segments_[block->segment_idx].begin + block->offset,
                                       Offer{block->segment_idx, 0, block->offset, bytes});
}

std::shared_ptr<Window> WorldHeap::allocate(uint64_t bytes) {
  if (bytes == 0)
    return std::make_shared<WorldWindow>(
        world_.threads(), core_, aside_, nullptr, nullptr, Offer{});
  while (true) {
    WindowAllocator::Block* block = nullptr;
    {
      const auto lock = core_->lock_with_nodes();
      block = core_->allocator.allocate(bytes);
    }
    if (block != nullptr)
      return make_window(block, bytes);
    if (!grow(bytes))
      throw CapacityError(concat("the heap of rank ", rank_idx_, " cannot hold ", bytes, " bytes"),
                          bytes,
                          largest_available_bytes());
  }
}

std::shared_ptr<Window> WorldHeap::allocate_free(uint64_t most_bytes) {
  WindowAllocator::Block* const block = core_->allocate_largest(most_bytes);
  return block == nullptr ? nullptr : make_window(block, std::min(most_bytes, block->bytes));
}

std::byte* WorldHeap::try_resolve(int rank_idx, const Offer& offer) {
  alignas(64) static std::byte nothing[64];
  if (offer.bytes == 0)
    return nothing;
  if (rank_idx == rank_idx_)
    return segments_[offer.segment_idx].begin + offer.offset;
  HostThreads& threads = world_.threads();
  if (!threads.step())
    return nothing;
  const auto* const segment = world_.link(rank_idx_).find_segment(rank_idx, offer.segment_idx);
  if (segment == nullptr)
    return nullptr;
  MOE_CHECK(offer.offset + offer.bytes <= segment->bytes,
            "rank ",
            rank_idx,
            " offers ",
            offer.bytes,
            " bytes at ",
            offer.offset,
            " of a segment of ",
            segment->bytes);
  threads.memory().join(threads.thread(), segment->known);
  return segment->begin + offer.offset;
}

bool WorldHeap::find(const void* address, uint64_t bytes, Offer* offer) const {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  for (uint32_t idx = 0; idx < segments_.size(); ++idx) {
    const auto begin = reinterpret_cast<uintptr_t>(segments_[idx].begin);
    if (wanted < begin || wanted + bytes > begin + segments_[idx].bytes)
      continue;
    *offer = Offer{idx, 0, wanted - begin, bytes};
    return true;
  }
  return false;
}

uint64_t WorldHeap::available_bytes() const {
  const std::lock_guard lock(core_->mutex);
  return core_->allocator.counters().free_bytes + part_bytes_ - num_used_bytes_;
}

uint64_t WorldHeap::largest_available_bytes() const {
  const std::lock_guard lock(core_->mutex);
  return std::max(core_->allocator.largest_free_bytes(), part_bytes_ - num_used_bytes_);
}

void WorldHeap::end_quarantine() {
  HostThreads& threads = world_.threads();
  ++aside_->round;
  if (threads.step_quietly())
    for (const auto& [begin, bytes] : aside_->ranges)
      threads.memory().free(threads.thread(), begin, bytes);
  aside_->ranges.clear();
  const std::lock_guard lock(core_->mutex);
  core_->allocator.end_quarantine();
}

}  // namespace moe::simt::checker
