#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/symmetric_memory.h"
#include "heap/peer_mesh.h"
#include "heap/share_in_place.h"

namespace moe::heap {

struct HeapOptions {
  uint64_t limit_bytes = 0;  ///< most resident bytes of segments, 0 for no limit
  bool with_huge_pages = true;
  bool poison = false;  ///< fill windows with 0xFF when they are handed out
};

struct HeapStats {
  uint64_t segment_bytes = 0;      ///< sum over this rank's segments
  uint64_t resident_bytes = 0;     ///< those of them that trim() has not returned
  uint64_t live_bytes = 0;         ///< bytes in windows that somebody holds
  uint64_t quarantined_bytes = 0;  ///< kept aside after an abort
  uint64_t peak_live_bytes = 0;
  uint64_t num_segments = 0;
  uint64_t num_windows = 0;
  uint64_t num_allocations = 0;  ///< since the heap was made
  uint64_t num_growths = 0;      ///< segments added inside allocate(), not by reserve()
  uint64_t huge_page_bytes = 0;  ///< bytes in 2 MiB pages, verified in smaps when asked
  uint64_t peer_segment_bytes = 0;
};

/// The shared-memory provider: memfd segments, announced to all peers over the mesh.
///
/// Windows stay valid when the heap is gone; the last of them unmaps the memory. In a forked child
/// the memory is absent: every method throws, windows are dropped without effect.
class ShmHeap : public SymmetricMemory {
 public:
  /// @param mesh  Connected; serves one heap.
  static std::shared_ptr<ShmHeap> create(std::shared_ptr<PeerMesh> mesh,
                                         const HeapOptions& options);

  /// Sees to it that one window of @p bytes can be allocated without growth: adds a segment unless
  /// a free range is that large. Local.
  /// @throws CapacityError
  virtual void reserve(uint64_t bytes) = 0;

  /// Turns ordinary memory of this process into shared pages, at the addresses where it is. Local.
  /// Nobody may write to it meanwhile. Each range keeps its pages until unshare() or abandon(),
  /// which must come before its memory is anybody else's.
  /// @param ranges  Ascending and apart, each with a whole page in it.
  /// @throws InvalidArgument  The pages of one are not private memory, or shared already.
  /// @throws CapacityError, SystemError  Those of some ranges could not be shared. None is then.
  virtual std::vector<std::shared_ptr<HeapPages>> share(const std::vector<MemoryRange>& ranges) = 0;

  /// Returns the pages of all free memory to the system; @return bytes returned. Local. Windows
  /// allocated there later are faulted in again by this rank.
  virtual uint64_t trim() = 0;

  /// @param verify_huge_pages  Read huge_page_bytes from /proc/self/smaps (milliseconds) instead of
  ///   what the system reported when it made them.
  virtual HeapStats stats(bool verify_huge_pages = false) const = 0;
};

}  // namespace moe::heap
