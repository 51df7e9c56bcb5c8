// A rank that comes back after its peers have given it up and gone on hears that it is evicted at
// its next call, although its service thread has not read what they said by then.

#include <atomic>
#include <cstdio>
#include <latch>
#include <string>

#include "core/error.h"
#include "group/group_shrink.h"
#include "thread_rank.h"

namespace {

constexpr int kSlow = 1;

}  // namespace

int main() {
  using moe::group::fail;
  moe::group::HeldService service;  // as if the whole process had been stopped
  std::latch have_agreed(2);
  std::atomic<bool> is_over{false};
  moe::group::run_group(3, [&](int rank_idx, moe::group::ThreadRank& rank) {
    if (rank_idx == kSlow) {
      service.hold(*rank.mesh);
      have_agreed.wait();
      service.release();
      const std::string said = moe::group::error_of<moe::Evicted>(
          [&] { rank.group->check_usable(moe::layout::Operation::kDispatch); },
          "a dispatch would begin on a rank that was given up");
      if (said.find("declared rank 1, which is this one, failed") == std::string::npos)
        fail(said);
      is_over = true;
      is_over.notify_all();
      return;
    }
    service.await();
    rank.group->abort(moe::layout::AbortCause::kPeerTimeout,
                      moe::group::WaitSite{},
                      {kSlow},
                      "rank 1 made no progress");
    moe::group::ShrinkAgreement::Arguments arguments;
    arguments.failed_ranks = {kSlow};
    rank.group->shrink_agreement().agree(arguments, nullptr);
    have_agreed.count_down();
    is_over.wait(false);
  });
  std::puts("ok");
}
