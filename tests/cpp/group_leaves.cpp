// Ranks that are threads of one process: who has made its group, left and given its memory back
// fails nobody who still makes the same group.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "heap/peer_mesh.h"
#include "heap/shm_heap.h"
#include "host/group.h"

namespace {

using moe::heap::PeerMesh;
using moe::heap::ShmHeap;
using moe::host::Group;

constexpr double kTimeoutS = 60.0;

struct Member {
  std::shared_ptr<PeerMesh> mesh;
  std::shared_ptr<ShmHeap> heap;
  std::unique_ptr<Group> group;

  void make_group(const moe::host::InterruptCheck& interrupt_check = nullptr) {
    heap = ShmHeap::create(mesh, {});
    const std::vector<int> members{0, 1};
    group = std::make_unique<Group>(
        mesh, heap, members, mesh->rank_idx(), 2, kTimeoutS, kTimeoutS, 1, false, interrupt_check);
  }
  void leave() {
    group.reset();
    heap.reset();
    mesh->leave();
    mesh.reset();
  }
};

}  // namespace

int main() {
  Member members[2];
  std::vector<std::string> addresses;
  for (auto& member : members) {
    member.mesh = PeerMesh::create();
    addresses.push_back(member.mesh->address());
  }
  std::atomic<bool> may_hold{false};
  std::atomic<bool> is_held{false};
  std::atomic<bool> has_left{false};
  std::thread stays([&] {
    Member& member = members[1];
    PeerMesh::ConnectOptions options;
    options.timeout_s = kTimeoutS;
    member.mesh->connect(1, addresses, options);
    // Once it has said its own, its service thread is kept busy until rank 0 has gone.
    member.mesh->add_listener([&] {
      if (may_hold) {
        is_held = true;
        has_left.wait(false);
      }
    });
    member.make_group([&] {
      if (!may_hold.exchange(true))
        member.mesh->post(1, 1, 0, "which wakes the service thread");
    });
    try {
      member.group->check_usable(moe::layout::Operation::kDispatch);
      std::fprintf(stderr, "a dispatch would begin without rank 0\n");
      std::abort();
    } catch (const moe::PeerFailed& error) {
      const std::string said = error.what();
      if (said.find("rank 0 left the communicator before this dispatch") == std::string::npos) {
        std::fprintf(stderr, "%s\n", said.c_str());
        std::abort();
      }
    }
    member.leave();
  });
  PeerMesh::ConnectOptions options;
  options.timeout_s = kTimeoutS;
  members[0].mesh->connect(0, addresses, options);
  while (!is_held)
    std::this_thread::yield();
  members[0].make_group();
  members[0].leave();
  has_left = true;
  has_left.notify_all();
  stays.join();
  std::puts("ok");
}
