// Ranks that are threads of one process: who has made its group, left and given its memory back
// fails nobody who still makes the same group.

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "thread_rank.h"

int main() {
  using moe::group::fail;
  std::vector<moe::group::ThreadRank> ranks(2);
  const std::vector<std::string> addresses = moe::group::make_meshes(&ranks);
  moe::group::HeldService service;
  std::thread stays([&] {
    moe::group::ThreadRank& rank = ranks[1];
    rank.connect(1, addresses);
    // Once it has said its own, its service thread is kept busy until rank 0 has gone.
    bool is_held = false;
    rank.make_group([&] {
      if (!is_held)
        service.hold(*rank.mesh);
      is_held = true;
    });
    const std::string said = moe::group::error_of<moe::PeerFailed>(
        [&] { rank.group->check_usable(moe::layout::Operation::kDispatch); },
        "a dispatch would begin without rank 0");
    if (said.find("rank 0 left the communicator before this dispatch") == std::string::npos)
      fail(said);
    rank.leave();
  });
  ranks[0].connect(0, addresses);
  service.await();
  ranks[0].make_group();
  ranks[0].leave();
  service.release();
  stays.join();
  std::puts("ok");
}
