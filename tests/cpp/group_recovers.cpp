// A rank that gives up recover() after all have agreed, and shrinks, takes along those that are
// still in it: they would wait in vain for the rank that never commits.

#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "group/group_shrink.h"
#include "thread_rank.h"

namespace {

constexpr int kStays = 0;
constexpr int kGivesUp = 1;
constexpr int kSilent = 2;

struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

int main() {
  using moe::group::fail;
  std::atomic<int> num_looks{0};
  std::atomic<bool> is_silent{false};
  std::atomic<bool> is_over{false};
  std::atomic<int> num_shrunk{0};
  moe::group::run_group(3, [&](int rank_idx, moe::group::ThreadRank& rank) {
    if (rank_idx != kSilent)
      is_silent.wait(false);
    try {
      rank.group->recover([&] {
        if (rank_idx == kSilent) {  // it has proposed, and commits to nothing
          is_silent = true;
          is_silent.notify_all();
          is_over.wait(false);
        } else if (rank_idx == kStays) {
          ++num_looks;
        } else if (num_looks > 2) {  // both have committed
          throw Interrupted("enough");
        }
      });
      fail("a recovery has ended without rank 2");
    } catch (const Interrupted&) {
    } catch (const moe::Evicted&) {
      if (rank_idx != kSilent)
        fail("a rank that goes on was evicted");
    } catch (const moe::PeerFailed& error) {
      const std::string said = error.what();
      if (rank_idx != kStays || said != "rank 1 called shrink() while rank 0 was in recover()")
        fail(said);
    }
    if (rank_idx != kSilent) {
      moe::group::ShrinkAgreement::Arguments arguments;
      if (rank_idx == kGivesUp)
        arguments.failed_ranks = {kSilent};
      const auto decision = rank.group->shrink_agreement().agree(arguments, nullptr);
      if (decision.survivors != std::vector<int>{kStays, kGivesUp})
        fail("others go on");
      if (++num_shrunk == 2) {
        is_over = true;
        is_over.notify_all();
      }
      is_over.wait(false);
    }
  });
  std::puts("ok");
}
