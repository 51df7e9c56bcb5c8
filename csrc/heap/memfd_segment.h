#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "heap/fork_guard.h"
#include "heap/owned_fd.h"

namespace moe::heap {

/// One shared mapping of a memfd, 2 MiB aligned, absent in forked children.
class Segment {
 public:
  Segment(std::byte* data, uint64_t bytes) : data_(data), bytes_(bytes) {}
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  uint64_t bytes_;
  ForkOrigin origin_;
};

/// A segment of this rank, before it is announced.
struct NewSegment {
  std::shared_ptr<Segment> segment;
  OwnedFd memfd;                 ///< for the peers; the mapping does not need it
  uint64_t huge_page_bytes = 0;  ///< bytes of the segment in huge pages, as MADV_COLLAPSE reported
};

/// Makes a segment that nobody can resize and faults it in.
///
/// @param bytes  A multiple of the page size.
/// @throws CapacityError  the machine does not have or give that memory; nothing was left behind.
/// @throws SystemError  no file descriptor.
NewSegment create_segment(uint64_t bytes, bool with_huge_pages);

/// Maps a segment that a peer announced.
/// @throws SystemError  the descriptor is not a sealed memory file of @p bytes, or mmap failed.
std::shared_ptr<Segment> map_peer_segment(int memfd, uint64_t bytes);

}  // namespace moe::heap
