#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/error.h"
#include "core/symmetric_memory.h"
#include "heap/heap_core.h"
#include "heap/segment_table.h"
#include "heap/window_allocator.h"

namespace moe::heap {

/// A block of a heap's allocator, whatever its memory is.
/// @tparam Core  A HeapCore; its release() takes the block back.
template <typename Core>
class HeapWindow final : public Window {
 public:
  /// @param block  Null for a window without memory.
  HeapWindow(std::shared_ptr<Core> core,
             WindowAllocator::Block* block,
             std::byte* data,
             const Offer& offer)
      : core_(std::move(core)), block_(block) {
    data_ = data;
    offer_ = offer;
  }
  /// The first @p bytes of @p block, which the window owns: whatever throws gives it back.
  static std::shared_ptr<HeapWindow> over(const std::shared_ptr<Core>& core,
                                          WindowAllocator::Block* block,
                                          uint64_t bytes) {
    const Offer offer = core->offer_of(*block, bytes);
    std::byte* const segment =
        core->table.find(offer.segment_idx)->data.load(std::memory_order_relaxed);
    try {
      return std::make_shared<HeapWindow>(core, block, segment + offer.offset, offer);
    } catch (...) {
      core->release(block);
      throw;
    }
  }
  ~HeapWindow() override { core_->release(block_); }

  void shrink(uint64_t bytes) override {
    MOE_CHECK(bytes <= offer_.bytes, "shrink() to ", bytes, " bytes of a window of ", offer_.bytes);
    core_->origin.check("the window");
    if (block_ == nullptr)
      return;
    const auto lock = core_->lock_with_nodes();
    core_->allocator.shrink(block_, bytes);
    offer_.bytes = bytes;
  }

  void quarantine() override {
    if (block_ == nullptr || core_->origin.is_forked_child())
      return;
    const std::lock_guard lock(core_->mutex);
    core_->allocator.quarantine(block_);
  }

 private:
  std::shared_ptr<Core> core_;
  WindowAllocator::Block* block_;
};

/// Address of a window without memory: one like any other, but nobody may touch it.
inline std::byte* empty_window_address() {
  alignas(WindowAllocator::kSmallBytes) static std::byte nothing[WindowAllocator::kSmallBytes];
  return nothing;
}

/// Address of an offer in the segment that @p entry maps here.
/// @throws InvalidArgument  it does not lie in the segment.
inline std::byte* place_in(const SegmentTable::Entry& entry, int rank_idx, const Offer& offer) {
  MOE_CHECK(offer.offset <= entry.bytes && offer.bytes <= entry.bytes - offer.offset,
            "rank ",
            rank_idx,
            " offers ",
            offer.bytes,
            " bytes at ",
            offer.offset,
            " of segment ",
            offer.segment_idx,
            ", which has ",
            entry.bytes,
            " bytes");
  return entry.data.load(std::memory_order_relaxed) + offer.offset;
}

}  // namespace moe::heap
