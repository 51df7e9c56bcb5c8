#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "group/group.h"
#include "heap/peer_mesh.h"
#include "heap/shm_heap.h"

namespace moe::group {

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

/// Ends the program, which then has not printed "ok".
[[noreturn]] inline void fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::abort();
}

/// Text of the Error that @p call throws; fails with @p otherwise where it throws nothing.
template <typename Error>
std::string error_of(const std::function<void()>& call, const std::string& otherwise) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  fail(otherwise);
}

/// Runs @p body on threads that are the ranks of one group, which all of them have by then; they
/// leave afterwards.
inline void run_group(int num_ranks, const std::function<void(int, ThreadRank&)>& body) {
  std::vector<ThreadRank> ranks(static_cast<size_t>(num_ranks));
  const std::vector<std::string> addresses = make_meshes(&ranks);
  std::barrier all_ready(num_ranks);
  std::vector<std::thread> threads;
  for (int rank_idx = 0; rank_idx < num_ranks; ++rank_idx)
    threads.emplace_back([&, rank_idx] {
      ThreadRank& rank = ranks[static_cast<size_t>(rank_idx)];
      rank.connect(rank_idx, addresses);
      rank.make_group();
      all_ready.arrive_and_wait();
      body(rank_idx, rank);
      rank.leave();
    });
  for (std::thread& thread : threads)
    thread.join();
}

/// Keeps the service thread of one rank busy, so that it reads nothing of what peers say.
class HeldService {
 public:
  /// Called by that rank.
  void hold(heap::PeerMesh& mesh) {
    mesh.add_listener([this] {
      is_held_ = true;
      is_held_.notify_all();
      is_released_.wait(false);
      // As if it were the last thread to run, of those that go on now.
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    });
    mesh.post(mesh.rank_idx(), 1, 0, "which wakes the service thread");
  }
  /// Called by any rank: from here on nothing is read until release().
  void await() const { is_held_.wait(false); }
  void release() {
    is_released_ = true;
    is_released_.notify_all();
  }

 private:
  std::atomic<bool> is_held_{false};
  std::atomic<bool> is_released_{false};
};

}  // namespace moe::group
