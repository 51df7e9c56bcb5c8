// A collective call that every rank has entered ends well on all of them, although one that has
// left it aborts the group while another's service thread has not read what both had sent.

#include <atomic>
#include <cstdio>
#include <string>
#include <vector>

#include "core/error.h"
#include "thread_rank.h"

namespace {

constexpr int kSlow = 0;
constexpr int kAborting = 2;

}  // namespace

int main() {
  using moe::group::fail;
  moe::group::HeldService service;
  std::atomic<bool> is_over{false};
  moe::group::run_group(3, [&](int rank_idx, moe::group::ThreadRank& rank) {
    if (rank_idx == kSlow)
      service.hold(*rank.mesh);
    service.await();
    const std::string own = std::to_string(rank_idx);
    const std::vector<std::string> gathered = rank.group->all_gather(own, nullptr);
    if (gathered != std::vector<std::string>{"0", "1", "2"})
      fail("rank " + own + " gathered something else");
    if (rank_idx == kAborting) {
      rank.group->abort(moe::layout::AbortCause::kPeerFailed,
                        moe::group::WaitSite{},
                        {1},
                        "rank 1 died afterwards");
      service.release();
    }
    if (rank_idx == kSlow) {
      const std::string said =
          moe::group::error_of<moe::PeerFailed>([&] { rank.group->all_gather(own, nullptr); },
                                                "the next call does not say what happened");
      if (said != "rank 1 died afterwards")
        fail(said);
      is_over = true;
      is_over.notify_all();
    }
    is_over.wait(false);
  });
  std::puts("ok");
}
