#pragma once

#include <atomic>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "heap/peer_mesh.h"
#include "heap/shm_heap.h"
#include "host/group.h"

namespace moe::host {

constexpr double kTimeoutS = 60.0;

/// A rank of one node that is a thread of this process.
struct ThreadRank {
  std::shared_ptr<heap::PeerMesh> mesh;
  std::shared_ptr<heap::ShmHeap> heap;
  std::unique_ptr<Group> group;

  void connect(int rank_idx, const std::vector<std::string>& addresses) {
    heap::PeerMesh::ConnectOptions options;
    options.timeout_s = kTimeoutS;
    mesh->connect(rank_idx, addresses, options);
  }
  void make_group(const InterruptCheck& interrupt_check = nullptr) {
    heap = heap::ShmHeap::create(mesh, {});
    std::vector<int> members(static_cast<size_t>(mesh->num_ranks()));
    std::iota(members.begin(), members.end(), 0);
    group = std::make_unique<Group>(mesh,
                                    heap,
                                    members,
                                    mesh->rank_idx(),
                                    mesh->num_ranks(),
                                    kTimeoutS,
                                    kTimeoutS,
                                    1,
                                    false,
                                    interrupt_check);
  }
  void leave() {
    group.reset();
    heap.reset();
    mesh->leave();
    mesh.reset();
  }
};

/// @return Their addresses, for connect().
inline std::vector<std::string> make_meshes(std::vector<ThreadRank>* ranks) {
  std::vector<std::string> addresses;
  for (ThreadRank& rank : *ranks) {
    rank.mesh = heap::PeerMesh::create();
    addresses.push_back(rank.mesh->address());
  }
  return addresses;
}

}  // namespace moe::host
