// Four ranks as threads, on two nodes: messages of every size between all pairs at once, and a
// stranger at every port.

#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "heap/peer_mesh.h"
#include "heap/tcp.h"
#include "heap/wire.h"

namespace {

using moe::heap::MeshAddress;
using moe::heap::OwnedFd;
using moe::heap::PeerMesh;
using moe::heap::TcpOptions;

constexpr int kNumRanks = 4;
constexpr int kNumLocalRanks = 2;
constexpr uint64_t kNumRounds = 60;
constexpr double kTimeoutS = 60.0;

void require(bool condition, const char* what) {
  if (condition)
    return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

std::string message(int sender, int receiver, uint64_t round) {
  std::mt19937_64 random(static_cast<uint64_t>(sender * kNumRanks + receiver) * kNumRounds + round);
  // Around the sizes at which a payload is received in its place, up to the longest.
  const uint64_t most_bytes[] = {1, 100, 70'000, 200'000, moe::heap::kMaxPayloadBytes + 1};
  std::string bytes(random() % most_bytes[round % std::size(most_bytes)], '\0');
  const auto step = static_cast<unsigned>(random() % 255 + 1);
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<char>(step * i + round);
  return bytes;
}

/// A program that finds the port: says nothing, or something else.
OwnedFd intrude(const MeshAddress& address, const std::string& words) {
  OwnedFd socket = moe::heap::dial_tcp(address.tcp_addresses[0], address.tcp_port);
  require(static_cast<bool>(socket), "a stranger can dial");
  while (moe::heap::dial_error(socket) == 0 && !words.empty() &&
         ::send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL) < 0) {
  }
  return socket;
}

void run_rank(PeerMesh& mesh) {
  for (uint64_t round = 0; round < kNumRounds; ++round)
    for (int peer_rank = 0; peer_rank < kNumRanks; ++peer_rank)
      mesh.post(peer_rank, 1, round, message(mesh.rank_idx(), peer_rank, round));
  for (uint64_t round = 0; round < kNumRounds; ++round)
    for (int peer_rank = 0; peer_rank < kNumRanks; ++peer_rank) {
      std::string payload;
      while (!mesh.take(peer_rank, 1, round, &payload)) {
        // One that has sent all it had may leave before this rank has read it.
        require(mesh.state(peer_rank) != moe::PeerState::kDead, "nobody dies");
        std::this_thread::yield();
      }
      require(payload == message(peer_rank, mesh.rank_idx(), round), "bytes arrive as sent");
    }
}

}  // namespace

int main() {
  std::vector<std::shared_ptr<PeerMesh>> meshes;
  std::vector<std::string> addresses;
  for (int rank_idx = 0; rank_idx < kNumRanks; ++rank_idx) {
    meshes.push_back(PeerMesh::create(TcpOptions{}));
    addresses.push_back(meshes.back()->address());
  }
  std::vector<OwnedFd> strangers;
  for (const MeshAddress& address :
       moe::heap::parse_addresses(addresses, {kNumRanks, kNumLocalRanks}))
    for (const std::string& words : {std::string(), std::string(100, 'x')})
      strangers.push_back(intrude(address, words));
  std::vector<std::thread> threads;
  for (int rank_idx = 0; rank_idx < kNumRanks; ++rank_idx)
    threads.emplace_back([&, rank_idx, mesh = meshes[static_cast<size_t>(rank_idx)]] {
      PeerMesh::ConnectOptions options;
      options.timeout_s = kTimeoutS;
      options.num_local_ranks = kNumLocalRanks;
      mesh->connect(rank_idx, addresses, options);
      run_rank(*mesh);
      mesh->leave();
    });
  meshes.clear();
  for (std::thread& thread : threads)
    thread.join();
  std::puts("ok");
  return 0;
}
