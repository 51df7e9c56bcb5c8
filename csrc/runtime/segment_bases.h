#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/symmetric_memory.h"
#include "group/group.h"
#include "runtime/device.h"

namespace moe::runtime {

/// Addresses of every rank's segments for this rank's kernels: a table in
/// page-locked memory that is filled as segments are announced. A kernel that is offered memory
/// whose entry is still 0 waits for it. Entries of ranks of other nodes stay 0.
class SegmentBases {
 public:
  SegmentBases(std::shared_ptr<group::Group> group,
               std::shared_ptr<SymmetricMemory> memory,
               Device& device);
  ~SegmentBases();
  SegmentBases(const SegmentBases&) = delete;
  SegmentBases& operator=(const SegmentBases&) = delete;

  /// [num_ranks, kernels::Buffer::kMaxSegments]
  const uint64_t* table() const { return reinterpret_cast<const uint64_t*>(table_.get()); }
  /// The same in device memory, of kernels alone: what they have read there.
  uint64_t* found() const { return reinterpret_cast<uint64_t*>(found_.get()); }

  /// Looks for segments that are new. Never blocks. Called by the link's thread whenever a peer
  /// announces one, and by the thread that has made the own heap grow.
  /// @throws CapacityError  a rank has more segments than the table has room for.
  void refresh();

 private:
  void refresh_from_link() noexcept;

  std::shared_ptr<group::Group> group_;
  std::shared_ptr<SymmetricMemory> memory_;
  std::shared_ptr<std::byte> table_;
  std::shared_ptr<std::byte> found_;
  std::mutex mutex_;
  std::vector<uint32_t> num_known_;  ///< by rank
  int listener_id_;
};

}  // namespace moe::runtime
