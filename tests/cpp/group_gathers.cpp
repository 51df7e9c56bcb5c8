// A collective call that every rank has entered ends well on all of them, although one that has
// left it aborts the group while another's service thread has not read what both had sent.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "thread_rank.h"

namespace {

constexpr int kSlow = 0;
constexpr int kAborting = 2;

}  // namespace

int main() {
  std::vector<moe::host::ThreadRank> ranks(3);
  const std::vector<std::string> addresses = moe::host::make_meshes(&ranks);
  std::atomic<int> num_ready{0};
  std::atomic<bool> is_held{false};
  std::atomic<bool> has_aborted{false};
  std::atomic<bool> is_over{false};
  const auto run = [&](int rank_idx) {
    moe::host::ThreadRank& rank = ranks[static_cast<size_t>(rank_idx)];
    rank.connect(rank_idx, addresses);
    rank.make_group();
    ++num_ready;
    while (num_ready < 3)
      std::this_thread::yield();
    if (rank_idx == kSlow) {
      rank.mesh->add_listener([&] {
        is_held = true;
        has_aborted.wait(false);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      });
      rank.mesh->post(kSlow, 1, 0, "which wakes the service thread");
    }
    while (!is_held)
      std::this_thread::yield();
    const std::string own = std::to_string(rank_idx);
    const std::vector<std::string> said = rank.group->all_gather(own, nullptr);
    if (said != std::vector<std::string>{"0", "1", "2"}) {
      std::fprintf(stderr, "rank %d gathered something else\n", rank_idx);
      std::abort();
    }
    if (rank_idx == kAborting) {
      rank.group->abort(moe::layout::AbortCause::kPeerFailed,
                        moe::host::WaitSite{},
                        {1},
                        "rank 1 died afterwards");
      has_aborted = true;
      has_aborted.notify_all();
    }
    if (rank_idx == kSlow) {
      try {
        rank.group->all_gather(own, nullptr);
        std::fprintf(stderr, "the next call does not say what happened\n");
        std::abort();
      } catch (const moe::PeerFailed& error) {
        if (std::string(error.what()) != "rank 1 died afterwards")
          throw;
      }
      is_over = true;
      is_over.notify_all();
    }
    is_over.wait(false);
    rank.leave();
  };
  std::vector<std::thread> threads;
  for (int rank_idx = 0; rank_idx < 3; ++rank_idx)
    threads.emplace_back(run, rank_idx);
  for (std::thread& thread : threads)
    thread.join();
  std::puts("ok");
}
