// The rail over sockets, between nodes that are threads of one process: every message arrives whole
// and in order, a sender is held back by a receiver that does not take, and nothing an earlier rail
// left behind is taken for something newer.

#include "group/socket_rail.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "heap/peer_mesh.h"

namespace {

using moe::Rail;
using moe::group::SocketRail;
using moe::group::SocketRailStream;
using moe::heap::PeerMesh;
using State = Rail::State;

constexpr double kTimeoutS = 60.0;

void require(bool condition, const std::string& what) {
  if (condition)
    return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::abort();
}

/// Another thread does its part soon, or the program ends and says what it waited for.
template <typename IsTrue>
void spin_until(IsTrue&& is_true, const char* what) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!is_true()) {
    require(std::chrono::steady_clock::now() < end, what);
    std::this_thread::yield();
  }
}

Rail::Buffer make_buffer(uint64_t bytes) {
  return Rail::Buffer(new std::byte[bytes], [](std::byte* memory) { delete[] memory; });
}

std::byte pattern(int src_node, int dst_node, uint64_t message_idx, uint64_t i) {
  return static_cast<std::byte>(
      (i * 131 + message_idx * 17 + static_cast<uint64_t>(src_node * 5 + dst_node) * 29) >> 1);
}

/// Sleeps until the rail has told of an end.
class Ends {
 public:
  void ring() {
    const std::lock_guard lock(mutex_);
    ++num_rings_;
    changed_.notify_all();
  }

  void await(const std::function<bool()>& is_ready, const char* what) {
    std::unique_lock lock(mutex_);
    require(changed_.wait_for(lock, std::chrono::seconds(60), is_ready), what);
  }

  State await_end(const Rail::Transfer& transfer) {
    await([&] { return transfer.state() != State::kMoving; }, "a transfer does not end");
    return transfer.state();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_rings_ = 0;
};

struct Node {
  int node_idx = 0;
  int num_nodes = 0;
  std::shared_ptr<PeerMesh> mesh;

  std::shared_ptr<SocketRail> rail(Ends* ends, uint64_t buffer_number, uint32_t generation) const {
    std::vector<int> link_ranks;
    for (int i = 0; i < num_nodes; ++i)
      link_ranks.push_back(i);
    const SocketRailStream stream{7, buffer_number, generation};
    auto made = std::make_shared<SocketRail>(mesh, link_ranks, node_idx, stream);
    if (ends != nullptr)
      made->set_listener([ends] { ends->ring(); });
    return made;
  }

  /// Returns when every node has come here.
  void meet(uint64_t round) const {
    for (int i = 0; i < num_nodes; ++i)
      if (i != node_idx)
        mesh->post(i, 1, round, "here");
    std::string payload;
    for (int i = 0; i < num_nodes; ++i)
      if (i != node_idx)
        spin_until([&] { return mesh->take(i, 1, round, &payload); }, "a node does not come");
  }
};

void on_nodes(int num_nodes, const std::function<void(const Node&)>& body) {
  std::vector<std::shared_ptr<PeerMesh>> meshes;
  std::vector<std::string> addresses;
  for (int i = 0; i < num_nodes; ++i) {
    meshes.push_back(PeerMesh::create());
    addresses.push_back(meshes.back()->address());
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < num_nodes; ++i)
    threads.emplace_back([&, i] {
      PeerMesh::ConnectOptions options;
      options.timeout_s = kTimeoutS;
      meshes[static_cast<size_t>(i)]->connect(i, addresses, options);
      body(Node{i, num_nodes, meshes[static_cast<size_t>(i)]});
    });
  for (auto& thread : threads)
    thread.join();
}

void messages_arrive(const Node& node) {
  const std::vector<uint64_t> sizes{1,
                                    100,
                                    SocketRail::kFrameBytes - 1,
                                    SocketRail::kFrameBytes,
                                    SocketRail::kFrameBytes + 1,
                                    5'000'001,
                                    3,
                                    40 * SocketRail::kFrameBytes};
  constexpr uint64_t kOffset = 13;
  Ends ends;
  const auto rail = node.rail(&ends, 1, 0);
  struct Pair {
    std::vector<Rail::Buffer> received;
    std::vector<std::shared_ptr<Rail::Transfer>> transfers;
  };
  std::vector<Pair> pairs(static_cast<size_t>(node.num_nodes));
  const auto receive_all = [&](int peer) {
    auto& pair = pairs[static_cast<size_t>(peer)];
    for (const uint64_t bytes : sizes) {
      pair.received.push_back(make_buffer(bytes + kOffset));
      pair.transfers.push_back(rail->receive(peer, pair.received.back(), kOffset, bytes));
    }
  };
  uint64_t total_bytes = 0;
  for (const uint64_t bytes : sizes)
    total_bytes += bytes;
  // One peer's messages are awaited before they are sent, the other's arrive before anyone asks.
  const int early_peer = (node.node_idx + 1) % node.num_nodes;
  receive_all(early_peer);
  node.meet(10);
  for (int peer = 0; peer < node.num_nodes; ++peer)
    for (uint64_t m = 0; peer != node.node_idx && m < sizes.size(); ++m) {
      auto buffer = make_buffer(sizes[m] + kOffset);
      for (uint64_t i = 0; i < sizes[m]; ++i)
        buffer.get()[kOffset + i] = pattern(node.node_idx, peer, m, i);
      pairs[static_cast<size_t>(peer)].transfers.push_back(
          rail->send(peer, buffer, kOffset, sizes[m]));
    }
  node.meet(11);
  for (int peer = 0; peer < node.num_nodes; ++peer)
    if (peer != node.node_idx && peer != early_peer)
      receive_all(peer);
  for (int peer = 0; peer < node.num_nodes; ++peer) {
    for (const auto& transfer : pairs[static_cast<size_t>(peer)].transfers)
      require(ends.await_end(*transfer) == State::kMoved, transfer->error());
    for (uint64_t m = 0; peer != node.node_idx && m < sizes.size(); ++m)
      for (uint64_t i = 0; i < sizes[m]; ++i)
        require(pairs[static_cast<size_t>(peer)].received[m].get()[kOffset + i] ==
                    pattern(peer, node.node_idx, m, i),
                "a byte differs");
  }
  const uint64_t num_peers = static_cast<uint64_t>(node.num_nodes) - 1;
  require(rail->sent_bytes() == num_peers * total_bytes, "sent bytes");
  require(rail->received_bytes() == num_peers * total_bytes, "received bytes");
  node.meet(12);
}

void a_slow_receiver_holds_the_sender(const Node& node) {
  constexpr uint64_t kNumMessages = 3 * SocketRail::kWindowFrames;
  Ends ends;
  const auto rail = node.rail(&ends, 2, 0);
  const auto buffer = make_buffer(SocketRail::kFrameBytes);
  std::fill_n(buffer.get(), SocketRail::kFrameBytes, std::byte{3});
  std::vector<std::shared_ptr<Rail::Transfer>> transfers;
  if (node.node_idx == 0) {
    for (uint64_t i = 0; i < kNumMessages; ++i)
      transfers.push_back(rail->send(1, buffer, 0, SocketRail::kFrameBytes));
    require(rail->sent_bytes() == SocketRail::kWindowFrames * SocketRail::kFrameBytes,
            "the window lets more or less through");
  }
  node.meet(20);
  if (node.node_idx == 0) {
    require(rail->sent_bytes() == SocketRail::kWindowFrames * SocketRail::kFrameBytes,
            "the window opens before the receiver takes anything");
  }
  node.meet(21);
  if (node.node_idx == 1)
    for (uint64_t i = 0; i < kNumMessages; ++i)
      transfers.push_back(
          rail->receive(0, make_buffer(SocketRail::kFrameBytes), 0, SocketRail::kFrameBytes));
  for (const auto& transfer : transfers)
    require(ends.await_end(*transfer) == State::kMoved, transfer->error());
  node.meet(22);
}

void an_earlier_rail_leaves_nothing(const Node& node) {
  const auto buffer = make_buffer(8);
  for (uint32_t generation = 0; generation < 3; ++generation) {
    for (uint64_t buffer_number = 3; buffer_number < 5; ++buffer_number) {
      Ends ends;
      const auto rail = node.rail(&ends, buffer_number, generation);
      const auto mark = static_cast<std::byte>(buffer_number * 16 + generation);
      if (node.node_idx == 0) {
        // The second is never asked for.
        for (int i = 0; i < 2; ++i) {
          const auto sent = make_buffer(8);
          std::fill_n(sent.get(), 8, mark);
          require(rail->send(1, sent, 0, 8)->state() == State::kMoved, "a small send waits");
        }
      } else {
        const auto transfer = rail->receive(0, buffer, 0, 8);
        require(ends.await_end(*transfer) == State::kMoved, transfer->error());
        require(buffer.get()[0] == mark && buffer.get()[7] == mark, "bytes of an earlier rail");
      }
      node.meet(30 + generation * 2 + buffer_number);
    }
  }
}

void ends_are_told(const Node& node) {
  Ends ends;
  const auto rail = node.rail(&ends, 6, 0);
  const auto buffer = make_buffer(64);
  if (node.node_idx == 0) {
    rail->send(1, buffer, 0, 24);
  } else {
    const auto transfer = rail->receive(0, buffer, 0, 25);
    require(ends.await_end(*transfer) == State::kFailed, "a message of another size was taken");
    require(transfer->error() == "node 0 sent message 0 of 24 bytes where 25 were expected",
            transfer->error());
    require(rail->receive(0, buffer, 0, 24)->state() == State::kFailed, "a broken stream goes on");
  }
  node.meet(50);
  const auto second = node.rail(&ends, 7, 0);
  const auto waiting = second->receive(1 - node.node_idx, buffer, 0, 64);
  second->give_up("enough");
  second->give_up("more than enough");
  require(waiting->state() == State::kFailed && waiting->error() == "enough", waiting->error());
  require(second->send(1 - node.node_idx, buffer, 0, 1)->state() == State::kFailed,
          "a rail that was given up sends");
  for (const int wrong : {-1, node.node_idx, 2}) {
    try {
      rail->send(wrong, buffer, 0, 1);
      require(false, "a send to nobody");
    } catch (const moe::InvalidArgument&) {
    }
  }
  try {
    rail->send(1 - node.node_idx, buffer, 0, 0);
    require(false, "a send of nothing");
  } catch (const moe::InvalidArgument&) {
  }
  node.meet(51);
}

void a_peer_may_leave(const Node& node) {
  Ends ends;
  const auto rail = node.rail(&ends, 8, 0);
  const auto buffer = make_buffer(64);
  if (node.node_idx == 0) {
    std::fill_n(buffer.get(), 64, std::byte{9});
    rail->send(1, buffer, 0, 64);
    node.mesh->leave();
    return;
  }
  spin_until([&] { return node.mesh->state(0) != moe::PeerState::kAlive; }, "a node stays");
  const auto sent_before = rail->receive(0, buffer, 0, 64);
  require(sent_before->state() == State::kMoved, "what was sent before its sender left is lost");
  require(buffer.get()[63] == std::byte{9}, "its bytes");
  const auto never_sent = rail->receive(0, buffer, 0, 64);
  require(ends.await_end(*never_sent) == State::kFailed, "a peer that left sends");
  require(never_sent->error() == "the rank of node 0 left", never_sent->error());
}

/// The service thread holds the lock of the rail when the process forks.
void a_forked_child_drops_its_rail(const Node& node) {
  auto rail = node.rail(nullptr, 9, 0);
  if (node.node_idx == 0) {
    // Had it arrived before it is asked for, the thread that asks would take it, not the service.
    node.meet(60);
    rail->send(1, make_buffer(64), 0, 64);
    return node.meet(61);
  }
  std::atomic<bool> is_dropping{false};
  std::atomic<bool> may_drop{false};
  const auto drop = [&](std::byte* memory) {
    is_dropping = true;
    while (!may_drop)
      std::this_thread::yield();
    delete[] memory;
  };
  rail->receive(0, Rail::Buffer(new std::byte[64], drop), 0, 64);
  node.meet(60);
  spin_until([&] { return is_dropping.load(); }, "the service thread takes nothing");
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    rail.reset();
    ::_exit(0);
  }
  int status = -1;
  require(::waitpid(child, &status, 0) == child && status == 0, "a forked child hangs");
  may_drop = true;
  node.meet(61);
}

}  // namespace

int main() {
  on_nodes(3, messages_arrive);
  on_nodes(2, a_slow_receiver_holds_the_sender);
  on_nodes(2, an_earlier_rail_leaves_nothing);
  on_nodes(2, ends_are_told);
  on_nodes(2, a_peer_may_leave);
  on_nodes(2, a_forked_child_drops_its_rail);
  std::puts("ok");
}
