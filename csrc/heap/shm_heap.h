#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/symmetric_memory.h"
#include "heap/peer_mesh.h"

namespace moe::heap {

struct HeapOptions {
  uint64_t limit_bytes = 0;  ///< most bytes of segments, 0 for no limit
  bool with_huge_pages = true;
  bool poison = false;  ///< fill windows with 0xFF when they are handed out
};

struct HeapStats {
  uint64_t segment_bytes = 0;      ///< sum over this rank's segments
  uint64_t resident_bytes = 0;     ///< of those, not returned by trim()
  uint64_t live_bytes = 0;         ///< in windows that somebody holds
  uint64_t quarantined_bytes = 0;  ///< kept aside after an abort
  uint64_t peak_live_bytes = 0;
  uint64_t num_segments = 0;
  uint64_t num_windows = 0;
  uint64_t num_allocations = 0;  ///< since the heap was made
  uint64_t num_growths = 0;
  uint64_t huge_page_bytes = 0;  ///< in 2 MiB pages, verified in smaps when asked
  uint64_t peer_segment_bytes = 0;
};

/// The shared-memory provider: memfd segments, announced to all peers over the mesh.
class ShmHeap : public SymmetricMemory {
 public:
  static std::shared_ptr<ShmHeap> create(std::shared_ptr<PeerMesh> mesh, const HeapOptions& options);

  /// Adds a segment so that @p bytes more can be allocated without growth. Local.
  /// @throws CapacityError
  virtual void reserve(uint64_t bytes) = 0;

  /// Returns the pages of all free memory to the system; @return bytes returned. Local. Windows
  /// allocated there later are faulted in again by this rank.
  virtual uint64_t trim() = 0;

  virtual HeapStats stats() const = 0;
};

}  // namespace moe::heap
