#include "host/arrival_watch.h"
#include "host/copy_run.h"
#include "host/wait.h"

// How a batched copy waits: for rows, which may come late, and for ranks that have entered.

namespace moe::host {

using layout::Phase;

bool CopyRun::is_missing(int peer_rank) const {
  return sync::load_acquire(engine_.own_workspace().done(peer_rank).value) < epoch_;
}

WaitSite CopyRun::site(Phase phase) const {
  return WaitSite{
      layout::Operation::kBatchedCopy, phase, static_cast<int64_t>(epoch_), &interrupt_check_};
}

void CopyRun::progress() {
  // Only this rank's own thread raises it.
  auto& activity = engine_.own_workspace().activity();
  sync::store_relaxed(activity.progress, sync::load_relaxed(activity.progress) + 1);
}

void CopyRun::await_row(int peer_rank) {
  const auto& row = engine_.own_workspace().row(peer_rank);
  const auto ready = [&] { return sync::load_acquire(row.epoch) >= epoch_; };
  if (ready()) [[likely]]
    return;
  const WaitSite where = site(Phase::kRows);
  ArrivalWatch arrival(group_, where, engine_.buffer_number(), peer_rank);
  wait_until(group_, ready, [&] {
    progress();
    if (interrupt_check_)
      interrupt_check_();
    if (ready())
      return;
    group_.check_abort();
    try {
      check_closed();
    } catch (const InvalidArgument&) {
      // No rank can get that row, so all end here alike; nothing was written to anybody.
      has_ended_ = true;
      group_.leave_presence();
      throw;
    }
    group_.check_peers(where, [&](int gone_rank) { return is_missing(gone_rank); });
    arrival.check([&](int rank_idx) {
      return sync::load_acquire(engine_.own_workspace().row(rank_idx).epoch) < epoch_;
    });
  });
}

void CopyRun::await_entered(Phase phase,
                            const std::function<bool()>& ready,
                            const std::function<bool(int)>& is_awaited) {
  if (ready()) [[likely]]
    return;
  // A rank that has entered raises its progress while it moves bytes and while it waits for others:
  // whose stands still is the one to blame, whomever this rank waits for.
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
  wait_until(group_, ready, [&] {
    progress();
    if (interrupt_check_)
      interrupt_check_();
    if (ready())
      return;
    group_.check_abort();
    group_.check_peers(where, [&](int gone_rank) { return is_missing(gone_rank); });
    const int64_t now_ns = sync::now_ns();
    for_active_peers([&](int peer_rank) {
      Sign& sign = signs[static_cast<size_t>(peer_rank)];
      const uint64_t now = sync::load_relaxed(engine_.workspace(peer_rank).activity().progress);
      if (now != sign.progress)
        sign = {now, now_ns};
      else if (now_ns - sign.since_ns > group_.stall_timeout_ns() && is_missing(peer_rank))
        give_up_stalled(peer_rank, phase);
      // Ranks that only wait for each other would show progress for ever.
      if (now_ns - start_ns > group_.arrival_timeout_ns() && is_awaited(peer_rank))
        give_up_stalled(peer_rank, phase);
    });
  });
}

void CopyRun::give_up_stalled(int peer_rank, Phase phase) {
  group_.abort(layout::AbortCause::kPeerTimeout,
               site(phase),
               {peer_rank},
               concat("rank ",
                      peer_rank,
                      " made no progress for ",
                      static_cast<double>(group_.stall_timeout_ns()) / 1e9,
                      " s in batched copy of buffer ",
                      engine_.buffer_number(),
                      ", epoch ",
                      epoch_,
                      ", phase ",
                      layout::phase_name(phase),
                      " of rank ",
                      group_.rank_idx()));
  group_.throw_abort();
}

}  // namespace moe::host
