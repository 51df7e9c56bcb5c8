#include "heap/peer_segments.h"

#include <algorithm>
#include <cerrno>
#include <exception>

#include "core/error.h"
#include "core/process.h"
#include "heap/process_registry.h"

namespace moe::heap {
namespace {

// Mapped between two looks at the sockets: some milliseconds where pages are small.
constexpr uint64_t kMapStepBytes = uint64_t{32} << 20;

}  // namespace

const SegmentTable::Entry* PeerSegments::find(uint32_t segment_idx) const {
  const SegmentTable::Entry* entry = table_.find(segment_idx);
  if (entry == nullptr && has_error_.load(std::memory_order_acquire)) [[unlikely]]
    throw SystemError(error_, ENOMEM);
  return entry;
}

void PeerSegments::add(uint32_t segment_idx,
                       uint64_t segment_bytes,
                       const OwnedFd& memfd) noexcept {
  try {
    std::shared_ptr<Segment> segment;
    if (memfd) {
      segment = map_peer_segment(memfd.get(), segment_bytes);
      unmapped_.push_back({segment, 0});
    } else {
      segment = process_registry::find_segment(mesh_token_, segment_idx);
      if (segment == nullptr)
        return;  // its heap is gone, and with it everything that was offered there
    }
    mapped_.push_back(segment);
    table_.publish(segment_idx, segment->data(), segment->bytes());
    bytes_.fetch_add(segment->bytes(), std::memory_order_relaxed);
  } catch (const std::exception& error) {
    if (has_error_.load(std::memory_order_relaxed))
      return;
    error_ = concat(
        "segment ", segment_idx, " of rank ", rank_idx_, " cannot be mapped: ", error.what());
    has_error_.store(true, std::memory_order_release);
  }
}

void PeerSegments::map_step() {
  if (unmapped_.empty())
    return;
  Unmapped& job = unmapped_.back();
  const uint64_t bytes = std::min(kMapStepBytes, job.segment->bytes() - job.num_mapped_bytes);
  const bool is_mapped = map_pages(job.segment->data() + job.num_mapped_bytes, bytes);
  job.num_mapped_bytes += bytes;
  if (!is_mapped || job.num_mapped_bytes == job.segment->bytes())
    unmapped_.pop_back();
}

}  // namespace moe::heap
