// A rank that leaves waits for a peer that takes its last messages slowly: all of them arrive, and
// then the goodbye.

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "thread_rank.h"

int main() {
  constexpr uint64_t kNumMessages = 50;
  const std::string message(100'000, 'm');
  std::vector<moe::group::ThreadRank> ranks(2);
  const std::vector<std::string> addresses = moe::group::make_meshes(&ranks);
  std::thread leaves([&] { ranks[0].connect(0, addresses); });
  ranks[1].connect(1, addresses);
  leaves.join();
  // More messages than the socket holds, and a pause after each time some were read.
  ranks[1].mesh->add_listener([] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
  for (uint64_t i = 0; i < kNumMessages; ++i)
    ranks[0].mesh->post(1, 5, i, message);
  ranks[0].mesh->leave();
  while (ranks[1].mesh->state(0) == moe::PeerState::kAlive)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  uint64_t num_taken = 0;
  std::string payload;
  while (num_taken < kNumMessages && ranks[1].mesh->take(0, 5, num_taken, &payload) &&
         payload == message)
    ++num_taken;
  const bool has_left = ranks[1].mesh->state(0) == moe::PeerState::kLeft;
  if (num_taken < kNumMessages || !has_left) {
    std::fprintf(stderr,
                 "%d of the messages arrived, and the peer is %s\n",
                 static_cast<int>(num_taken),
                 has_left ? "gone in good order" : "taken for dead");
    return 1;
  }
  std::puts("ok");
}
