#pragma once

#include <memory>
#include <string>

#include "core/symmetric_memory.h"
#include "cuda/cuda_device.h"
#include "heap/peer_mesh.h"
#include "heap/shm_heap.h"

namespace moe::cuda {

/// Memory of GPUs that reach each other: one NVLink or PCIe domain, or several ranks on one GPU, as
/// processes or as threads of one process.
///
/// Segments are announced over the mesh and opened by its service thread, each once per process, or
/// per device of a process where they are shared by IPC.
/// Windows stay valid when the heap is gone; after the last of them this rank's memory is unmapped.
/// A window that is given back is handed out again once all work has ended that was then in any
/// stream the device knows: those it made, and those that callers named. Giving back synchronizes
/// nothing, needs no GIL and no peer, and is legal while streams are captured and at exit.
class CudaHeap : public SymmetricMemory {
 public:
  /// @param mesh     Connected; serves one heap of this kind.
  /// @param options  `with_huge_pages` says nothing here.
  static std::shared_ptr<CudaHeap> create(std::shared_ptr<heap::PeerMesh> mesh,
                                          std::shared_ptr<CudaDevice> device,
                                          const heap::HeapOptions& options);

  /// Adds a segment unless a free range has @p bytes. Local.
  /// @throws CapacityError
  virtual void reserve(uint64_t bytes) = 0;

  virtual heap::HeapStats stats() const = 0;

  /// Way of the latest segment to other processes: "descriptor", "fabric" or "ipc"; "" while
  /// there is none.
  virtual std::string sharing() const = 0;
};

}  // namespace moe::cuda
