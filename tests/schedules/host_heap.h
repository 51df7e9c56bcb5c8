#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/symmetric_memory.h"
#include "heap/heap_core.h"
#include "schedules/host_link.h"

namespace moe::simt::checker {

/// Bytes that windows in quarantine left behind: in use until the quarantine ends.
struct SetAside {
  uint64_t round = 1;
  std::vector<std::pair<std::byte*, uint64_t>> ranges;
};

/// The heap of one rank: the real bookkeeping of windows and its lock, over a part of the memory
/// that is watched. It grows by segments, of which peers hear by the link.
class WorldHeap final : public SymmetricMemory {
 public:
  WorldHeap(HostWorld& world, int rank_idx);

  std::shared_ptr<Window> allocate(uint64_t bytes) override;
  std::shared_ptr<Window> allocate_free(uint64_t most_bytes) override;
  std::byte* try_resolve(int rank_idx, const Offer& offer) override;
  bool find(const void* address, uint64_t bytes, Offer* offer) const override;
  uint64_t available_bytes() const override;
  uint64_t largest_available_bytes() const override;
  void end_quarantine() override;

 private:
  struct OwnPart {
    std::byte* begin;
    uint64_t bytes;
  };

  bool grow(uint64_t bytes);
  std::shared_ptr<Window> make_window(heap::WindowAllocator::Block* block, uint64_t bytes);

  HostWorld& world_;
  int rank_idx_;
  std::shared_ptr<heap::HeapCore> core_;
  std::shared_ptr<SetAside> aside_;
  std::vector<OwnPart> segments_;
  std::byte* part_begin_;
  uint64_t part_bytes_;
  uint64_t num_used_bytes_ = 0;
};

}  // namespace moe::simt::checker
