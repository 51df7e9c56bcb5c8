// A rank that comes back after its peers have given it up and gone on hears that it is evicted at
// its next call, although its service thread has not read what they said by then.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "host/group_shrink.h"
#include "thread_rank.h"

namespace {

constexpr int kSlow = 1;

}  // namespace

int main() {
  std::vector<moe::host::ThreadRank> ranks(3);
  const std::vector<std::string> addresses = moe::host::make_meshes(&ranks);
  std::atomic<int> num_ready{0};
  std::atomic<bool> is_held{false};
  std::atomic<int> num_agreed{0};
  std::atomic<bool> has_called{false};
  std::atomic<bool> is_over{false};
  const auto run = [&](int rank_idx) {
    moe::host::ThreadRank& rank = ranks[static_cast<size_t>(rank_idx)];
    rank.connect(rank_idx, addresses);
    rank.make_group();
    ++num_ready;
    while (num_ready < 3)
      std::this_thread::yield();
    if (rank_idx == kSlow) {
      // As if the whole process had been stopped, and its service thread were the last to run.
      rank.mesh->add_listener([&] {
        is_held = true;
        has_called.wait(false);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      });
      rank.mesh->post(kSlow, 1, 0, "which wakes the service thread");
      while (num_agreed < 2)
        std::this_thread::yield();
      has_called = true;
      has_called.notify_all();
      try {
        rank.group->check_usable(moe::layout::Operation::kDispatch);
        std::fprintf(stderr, "a dispatch would begin on a rank that was given up\n");
        std::abort();
      } catch (const moe::Evicted& error) {
        const std::string said = error.what();
        if (said.find("declared rank 1, which is this one, failed") == std::string::npos) {
          std::fprintf(stderr, "%s\n", said.c_str());
          std::abort();
        }
      }
      is_over = true;
      is_over.notify_all();
    } else {
      while (!is_held)
        std::this_thread::yield();
      rank.group->abort(moe::layout::AbortCause::kPeerTimeout,
                        moe::host::WaitSite{},
                        {kSlow},
                        "rank 1 made no progress");
      moe::host::ShrinkAgreement::Arguments arguments;
      arguments.failed_ranks = {kSlow};
      rank.group->shrink_agreement().agree(arguments, nullptr);
      ++num_agreed;
      is_over.wait(false);
    }
    rank.leave();
  };
  std::vector<std::thread> threads;
  for (int rank_idx = 0; rank_idx < 3; ++rank_idx)
    threads.emplace_back(run, rank_idx);
  for (std::thread& thread : threads)
    thread.join();
  std::puts("ok");
}
