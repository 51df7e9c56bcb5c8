#include <algorithm>

#include "host/arrival_watch.h"
#include "host/exchange.h"
#include "host/wait.h"

// How an operation waits: for rows, which may come late, and for flags of peers that have entered.

namespace moe::host {

namespace {

// A peer may die after its part of an operation that the others can complete; who has not entered
// by then has seen the death as well and will not.
constexpr int64_t kDeathGraceNs = 300'000'000;

// What a rank of another node sent before it left or died, or the reason why a rail failed, may
// still be on its way.
constexpr int64_t kRemoteGraceNs = 2'000'000'000;

using layout::Phase;
using layout::Row;

/// Since when a peer has been gone.
class GoneWatch {
 public:
  /// Whether it has been gone for that long; call it while the peer is gone.
  bool has_passed(int64_t now_ns, int64_t grace_ns) {
    if (since_ns_ == 0)
      since_ns_ = now_ns;
    return now_ns - since_ns_ > grace_ns;
  }
  void restart() { since_ns_ = 0; }

 private:
  int64_t since_ns_ = 0;
};

}  // namespace

WaitLadder Exchange::ladder_for(int peer_rank) const {
  const uint32_t peer_core = sync::load_relaxed(endpoint_.workspace(peer_rank).activity().core);
  return peer_core == sync::current_core() ? wait_ladder_on_core_of_peer(group_.has_spare_cores())
                                           : wait_ladder(group_.has_spare_cores());
}

void Exchange::await_row(int peer_rank) {
  const Row& row = endpoint_.own_workspace().row(epoch_, peer_rank);
  const auto ready = [&] {
    if (relay_ != nullptr)
      relay_->pump();
    return sync::load_acquire(row.epoch) >= epoch_;
  };
  if (ready()) [[likely]]
    return;
  GoneWatch death;
  GoneWatch remote_end;
  auto& activity = endpoint_.own_workspace().activity();
  const WaitSite where = site(Phase::kRows);
  ArrivalWatch arrival(group_, where, endpoint_.buffer_number(), peer_rank);
  wait_until(group_, ladder_for(peer_rank), ready, [&] {
    show_wait(peer_rank, Phase::kRows, epoch_);
    if (interrupt_check_)
      interrupt_check_();
    if (ready())
      return;
    group_.check_abort();
    try {
      check_closed();
    } catch (const InvalidArgument&) {
      // No rank can get that row, so all end here alike; nothing was written to anybody.
      close();
      throw;
    }
    const int64_t now_ns = sync::now_ns();
    group_.check_peers(where, [&](int gone_rank) {
      if (sync::load_acquire(endpoint_.own_workspace().row(epoch_, gone_rank).epoch) < epoch_)
        return group_.is_local(gone_rank) || remote_end.has_passed(now_ns, kRemoteGraceNs);
      return group_.state(gone_rank) == PeerState::kDead && death.has_passed(now_ns, kDeathGraceNs);
    });
    arrival.check([&](int rank_idx) {
      return sync::load_acquire(endpoint_.own_workspace().row(epoch_, rank_idx).epoch) < epoch_;
    });
  });
  sync::store_relaxed(activity.waiting_for, uint32_t{0});
  end_wait(arrival.start_ns(), peer_rank);
}

void Exchange::await_flag(int peer_rank, Phase phase, uint64_t epoch, const uint64_t& flag) {
  const auto ready = [&] {
    if (relay_ != nullptr)
      relay_->pump();
    return sync::load_acquire(flag) >= epoch;
  };
  if (ready()) [[likely]]
    return;
  const int64_t start_ns = sync::now_ns();
  auto& activity = endpoint_.own_workspace().activity();
  const auto& peer_activity = endpoint_.workspace(watched_rank(peer_rank)).activity();
  const WaitSite where = site(phase);
  int64_t moved_ns = start_ns;
  GoneWatch remote_end;
  uint64_t seen_progress = sync::load_relaxed(peer_activity.progress);
  wait_until(group_, ladder_for(peer_rank), ready, [&] {
    show_wait(peer_rank, phase, epoch);
    if (interrupt_check_)
      interrupt_check_();
    if (ready())
      return;
    group_.check_abort();
    const int64_t now_ns = sync::now_ns();
    const uint64_t progress = sync::load_relaxed(peer_activity.progress);
    if (progress != seen_progress) {
      seen_progress = progress;
      moved_ns = now_ns;
      remote_end.restart();
    }
    group_.check_peers(where, [&](int gone_rank) {
      return sync::load_acquire(endpoint_.own_workspace().done(epoch, gone_rank).epoch) < epoch &&
             (group_.is_local(gone_rank) || remote_end.has_passed(now_ns, kRemoteGraceNs));
    });
    // Memory that is being faulted in shows no progress, and takes its time.
    const bool is_growing =
        sync::load_relaxed(peer_activity.phase) == static_cast<int32_t>(Phase::kGrowing);
    if (now_ns - moved_ns > (is_growing ? group_.arrival_timeout_ns() : group_.stall_timeout_ns()))
      give_up_stalled(peer_rank, where);
  });
  sync::store_relaxed(activity.waiting_for, uint32_t{0});
  end_wait(start_ns, peer_rank);
}

void Exchange::await_rail(int peer_rank, const std::function<bool()>& is_ready) {
  if (is_ready())
    return;
  const int64_t start_ns = sync::now_ns();
  const WaitSite where = site(Phase::kData);
  GoneWatch remote_end;
  wait_until(group_, wait_ladder(group_.has_spare_cores()), is_ready, [&] {
    show_wait(peer_rank, Phase::kIdle, epoch_);
    if (interrupt_check_)
      interrupt_check_();
    if (is_ready())
      return;
    group_.check_abort();
    const int64_t now_ns = sync::now_ns();
    group_.check_peers(where, [&](int gone_rank) {
      if (sync::load_acquire(endpoint_.own_workspace().done(epoch_, gone_rank).epoch) >= epoch_)
        return false;
      return group_.is_local(gone_rank) || remote_end.has_passed(now_ns, kRemoteGraceNs);
    });
    if (now_ns - start_ns > group_.stall_timeout_ns())
      give_up_stalled(peer_rank, where);
  });
  sync::store_relaxed(endpoint_.own_workspace().activity().waiting_for, uint32_t{0});
  end_wait(start_ns, peer_rank);
}

void Exchange::give_up_rail(int peer_rank, const std::string& text) {
  constexpr int64_t kLookNs = 1'000'000;
  const int64_t end_ns = sync::now_ns() + std::min(kRemoteGraceNs, group_.stall_timeout_ns());
  const WaitSite where = site(step_);
  const auto& workspace = endpoint_.own_workspace();
  do {
    if (interrupt_check_)
      interrupt_check_();
    group_.check_abort();
    group_.check_peers(where, [&](int gone_rank) {
      return sync::load_acquire(workspace.done(epoch_, gone_rank).epoch) < epoch_;
    });
    sync::sleep_ns(kLookNs);
  } while (sync::now_ns() < end_ns);
  group_.abort(layout::AbortCause::kPeerFailed,
               where,
               {peer_rank},
               concat("the rail between rank ",
                      group_.rank_idx(),
                      " and rank ",
                      peer_rank,
                      " failed in ",
                      layout::operation_name(operation_),
                      " of buffer ",
                      endpoint_.buffer_number(),
                      ", epoch ",
                      epoch_,
                      ": ",
                      text));
  group_.throw_abort();
}

void Exchange::show_wait(int peer_rank, Phase phase, uint64_t flag_epoch) {
  auto& activity = endpoint_.own_workspace().activity();
  sync::store_relaxed(activity.waiting_epoch, flag_epoch);
  sync::store_relaxed(activity.waiting_phase, static_cast<int32_t>(phase));
  sync::store_relaxed(activity.waiting_for, static_cast<uint32_t>(peer_rank + 1));
}

void Exchange::give_up_stalled(int peer_rank, const WaitSite& where) {
  // A peer that itself waits for somebody is not the one to blame: follow the chain to its end,
  // over all nodes. Every rank is asked, because what a stopped one has written down is old.
  int culprit = watched_rank(peer_rank);
  if (culprit == group_.rank_idx())
    culprit = peer_rank;
  std::vector<uint8_t> has_asked(static_cast<size_t>(group_.num_ranks()));
  has_asked[static_cast<size_t>(group_.rank_idx())] = 1;
  while (true) {
    has_asked[static_cast<size_t>(culprit)] = 1;
    const std::optional<int> next = group_.ask_awaited(culprit, endpoint_.buffer_number(), where);
    if (!next || *next < 0 || *next >= group_.num_ranks() || has_asked[static_cast<size_t>(*next)])
      break;
    culprit = *next;
  }
  host::give_up_stalled(group_, where, endpoint_.buffer_number(), culprit, peer_rank);
}

void Exchange::end_wait(int64_t start_ns, int peer_rank) {
  const int64_t now_ns = sync::now_ns();
  waited_ns_.resize(static_cast<size_t>(group_.num_ranks()));
  waited_ns_[static_cast<size_t>(peer_rank)] += now_ns - start_ns;
  endpoint_.add_wait(peer_rank, now_ns - start_ns);
  if (!endpoint_.tracer().is_enabled())
    return;
  // Records of one operation do not overlap: own work ends where a wait starts.
  record(phase_start_ns_, start_ns, -1);
  record(start_ns, now_ns, peer_rank);
  phase_start_ns_ = now_ns;
}

}  // namespace moe::host
