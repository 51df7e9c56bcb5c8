// Ranks that are threads of one process: who has made its group, left and given its memory back
// fails nobody who still makes the same group.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "thread_rank.h"

int main() {
  std::vector<moe::host::ThreadRank> ranks(2);
  const std::vector<std::string> addresses = moe::host::make_meshes(&ranks);
  std::atomic<bool> may_hold{false};
  std::atomic<bool> is_held{false};
  std::atomic<bool> has_left{false};
  std::thread stays([&] {
    moe::host::ThreadRank& rank = ranks[1];
    rank.connect(1, addresses);
    // Once it has said its own, its service thread is kept busy until rank 0 has gone.
    rank.mesh->add_listener([&] {
      if (may_hold) {
        is_held = true;
        has_left.wait(false);
      }
    });
    rank.make_group([&] {
      if (!may_hold.exchange(true))
        rank.mesh->post(1, 1, 0, "which wakes the service thread");
    });
    try {
      rank.group->check_usable(moe::layout::Operation::kDispatch);
      std::fprintf(stderr, "a dispatch would begin without rank 0\n");
      std::abort();
    } catch (const moe::PeerFailed& error) {
      const std::string said = error.what();
      if (said.find("rank 0 left the communicator before this dispatch") == std::string::npos) {
        std::fprintf(stderr, "%s\n", said.c_str());
        std::abort();
      }
    }
    rank.leave();
  });
  ranks[0].connect(0, addresses);
  while (!is_held)
    std::this_thread::yield();
  ranks[0].make_group();
  ranks[0].leave();
  has_left = true;
  has_left.notify_all();
  stays.join();
  std::puts("ok");
}
