#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "heap/memfd_segment.h"
#include "heap/owned_fd.h"
#include "heap/segment_table.h"
#include "heap/wire.h"

namespace moe::heap {

/// The segments one peer announced, mapped into this process.
///
/// find() may be called by any thread and takes no lock; the rest belongs to the service thread.
class PeerSegments {
 public:
  /// @param rank_idx  Rank of the peer, for messages.
  /// @param mesh_token  Token of the peer: where its segments are found when it is a thread of this
  ///   process.
  PeerSegments(int rank_idx, const Token& mesh_token)
      : rank_idx_(rank_idx), mesh_token_(mesh_token) {}

  /// An announced segment, or null.
  /// @throws SystemError  an announcement arrived but could not be mapped.
  const SegmentTable::Entry* find(uint32_t segment_idx) const;

  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  /// Maps an announced segment; without @p memfd the owner is a thread of this process. A failure
  /// is kept for find(), whose callers need the segment and can say so.
  void add(uint32_t segment_idx, uint64_t segment_bytes, const OwnedFd& memfd) noexcept;

  /// Returns whether map_step() has work left.
  bool has_unmapped_pages() const { return !unmapped_.empty(); }

  /// Maps some pages of what was announced, so that the first operation does not fault on each.
  void map_step();

 private:
  struct Unmapped {
    std::shared_ptr<Segment> segment;
    uint64_t num_mapped_bytes;
  };

  int rank_idx_;
  Token mesh_token_;
  SegmentTable table_;
  std::atomic<uint64_t> bytes_{0};
  std::vector<std::shared_ptr<Segment>> mapped_;
  std::vector<Unmapped> unmapped_;
  std::string error_;  ///< valid once has_error_ is seen
  std::atomic<bool> has_error_{false};
};

}  // namespace moe::heap
