#include "group/peer_wait.h"
#include "ops/copy_run.h"

// How a batched copy waits: for rows, which may come late, and for ranks that have entered.

namespace moe::host {

using layout::Phase;

bool CopyRun::is_missing(int peer_rank) const {
  return sync::load_acquire(engine_.own_workspace().done(peer_rank).value) < epoch_;
}

WaitSite CopyRun::site(Phase phase) const {
  return WaitSite{layout::Operation::kBatchedCopy,
                  phase,
                  static_cast<int64_t>(epoch_),
                  engine_.buffer_number(),
                  &interrupt_check_};
}

void CopyRun::progress() {
  // Only this rank's own thread raises it.
  auto& activity = engine_.own_workspace().activity();
  sync::store_relaxed(activity.progress, sync::load_relaxed(activity.progress) + 1);
}

void CopyRun::await_row(int peer_rank) {
  const auto has_row = [&](int rank_idx) {
    return sync::load_acquire(engine_.own_workspace().row(rank_idx).epoch) >= epoch_;
  };
  const auto ready = [&] { return has_row(peer_rank); };
  if (ready()) [[likely]]
    return;
  const WaitSite where = site(Phase::kRows);
  ArrivalWatch arrival(group_, where, peer_rank);
  await_peer(group_, where, ready, [&](int64_t now_ns) {
    progress();
    try {
      check_closed();
    } catch (const InvalidArgument&) {
      // No rank can get that row, so all end here alike; nothing was written to anybody.
      has_ended_ = true;
      group_.leave_presence();
      throw;
    }
    // Nobody is done before it has this rank's verdict, which follows all rows.
    check_gone(group_, where, [&](int gone_rank) { return is_missing(gone_rank); });
    arrival.check(now_ns, [&](int rank_idx) { return !has_row(rank_idx); });
  });
}

void CopyRun::await_entered(Phase phase,
                            const std::function<bool()>& ready,
                            const std::function<bool(int)>& is_awaited) {
  if (ready()) [[likely]]
    return;
  // A rank that has entered raises its progress while it moves bytes and while it waits for others:
  // whose stands still is the one to blame, whomever this rank waits for. So nobody is asked.
  struct Sign {
    uint64_t progress;
    int64_t since_ns;
  };
  const int64_t start_ns = sync::now_ns();
  std::vector<Sign> signs(rows_.size());
  for_active_peers([&](int peer_rank) {
    signs[static_cast<size_t>(peer_rank)] = {
        sync::load_relaxed(engine_.workspace(peer_rank).activity().progress), start_ns};
  });
  const WaitSite where = site(phase);
  const auto give_up = [&](int peer_rank, int64_t limit_ns) {
    give_up_stalled(group_, where, peer_rank, limit_ns, concat("rank ", peer_rank));
  };
  await_peer(group_, where, ready, [&](int64_t now_ns) {
    progress();
    check_gone(group_, where, [&](int gone_rank) { return is_missing(gone_rank); });
    for_active_peers([&](int peer_rank) {
      Sign& sign = signs[static_cast<size_t>(peer_rank)];
      const uint64_t now = sync::load_relaxed(engine_.workspace(peer_rank).activity().progress);
      if (now != sign.progress)
        sign = {now, now_ns};
      else if (now_ns - sign.since_ns > group_.stall_timeout_ns() && is_missing(peer_rank))
        give_up(peer_rank, group_.stall_timeout_ns());
      // Ranks that only wait for each other would show progress for ever.
      if (now_ns - start_ns > group_.arrival_timeout_ns() && is_awaited(peer_rank))
        give_up(peer_rank, group_.arrival_timeout_ns());
    });
  });
}

}  // namespace moe::host
