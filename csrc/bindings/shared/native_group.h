#pragma once

#include <memory>

#include "group/group.h"
#include "heap/peer_mesh.h"
#include "heap/shm_heap.h"

namespace moe::bindings {

/// A communicator's native parts; a child shares the mesh and the heap of its parent.
struct NativeGroup {
  std::shared_ptr<heap::PeerMesh> mesh;
  std::shared_ptr<heap::ShmHeap> heap;
  std::shared_ptr<group::Group> group;
  bool owns_mesh = false;
};

}  // namespace moe::bindings
