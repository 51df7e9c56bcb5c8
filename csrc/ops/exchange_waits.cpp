#include <algorithm>
#include <utility>

#include "group/peer_wait.h"
#include "ops/exchange.h"

// What an operation waits for: rows, which may come late, and flags of peers that have entered.

namespace moe::host {

using layout::Phase;
using layout::Row;

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
  const auto is_missing = [&](int rank_idx) {
    return sync::load_acquire(endpoint_.own_workspace().row(epoch_, rank_idx).epoch) < epoch_;
  };
  const WaitSite where = site(Phase::kRows);
  ArrivalWatch arrival(group_, where, peer_rank);
  GoneWatch gone;
  await_peer(group_, ladder_for(peer_rank), where, ready, [&](int64_t now_ns) {
    show_wait(peer_rank, Phase::kRows, epoch_);
    try {
      check_closed();
    } catch (const InvalidArgument&) {
      // No rank can get that row, so all end here alike; nothing was written to anybody.
      close();
      throw;
    }
    check_gone(group_, where, [&](int gone_rank) {
      return is_missing(gone_rank) ? gone.has_ended(group_, gone_rank, now_ns)
                                   : gone.keeps_others(group_, gone_rank, now_ns);
    });
    arrival.check(now_ns, is_missing);
  });
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
  const auto& peer_activity = endpoint_.workspace(watched_rank(peer_rank)).activity();
  uint64_t seen_progress = sync::load_relaxed(peer_activity.progress);
  const auto has_moved = [&] {
    const uint64_t progress = sync::load_relaxed(peer_activity.progress);
    return std::exchange(seen_progress, progress) != progress;
  };
  // Memory that is being faulted in shows no progress, and takes its time.
  const auto limit_ns = [&] {
    const bool is_growing =
        sync::load_relaxed(peer_activity.phase) == static_cast<int32_t>(Phase::kGrowing);
    return is_growing ? group_.arrival_timeout_ns() : group_.stall_timeout_ns();
  };
  await_part(
      peer_rank, phase, site(phase), epoch, ladder_for(peer_rank), ready, has_moved, limit_ns);
}

void Exchange::await_rail(int peer_rank, const std::function<bool()>& is_ready) {
  if (is_ready())
    return;
  // What moves over the rail is no flag, and a rank of another node shows no progress here.
  await_part(
      peer_rank,
      Phase::kIdle,
      site(Phase::kData),
      epoch_,
      wait_ladder(group_.has_spare_cores()),
      is_ready,
      [] { return false; },
      [this] { return group_.stall_timeout_ns(); });
}

template <typename Ready, typename HasMoved, typename Limit>
void Exchange::await_part(int peer_rank,
                          Phase shown_phase,
                          const WaitSite& where,
                          uint64_t epoch,
                          const WaitLadder& ladder,
                          const Ready& ready,
                          const HasMoved& has_moved,
                          const Limit& limit_ns) {
  const int64_t start_ns = sync::now_ns();
  int64_t moved_ns = start_ns;
  GoneWatch gone;
  await_peer(group_, ladder, where, ready, [&](int64_t now_ns) {
    show_wait(peer_rank, shown_phase, epoch);
    if (has_moved()) {
      moved_ns = now_ns;
      gone.restart();
    }
    check_gone(group_, where, [&](int gone_rank) {
      return !is_done(gone_rank, epoch) && gone.has_ended(group_, gone_rank, now_ns);
    });
    if (const int64_t limit = limit_ns(); now_ns - moved_ns > limit)
      give_up_stalled(peer_rank, where, limit);
  });
  end_wait(start_ns, peer_rank);
}

bool Exchange::is_done(int peer_rank, uint64_t epoch) const {
  return sync::load_acquire(endpoint_.own_workspace().done(epoch, peer_rank).epoch) >= epoch;
}

void Exchange::give_up_rail(int peer_rank, const std::string& text) {
  constexpr int64_t kLookNs = 1'000'000;
  const int64_t end_ns = sync::now_ns() + std::min(kRemoteGraceNs, group_.stall_timeout_ns());
  const WaitSite where = site(step_);
  do {
    look_up(
        group_,
        where,
        [] { return false; },
        [&](int64_t) {
          check_gone(group_, where, [&](int gone_rank) { return !is_done(gone_rank, epoch_); });
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

void Exchange::give_up_stalled(int peer_rank, const WaitSite& where, int64_t limit_ns) {
  const int first = watched_rank(peer_rank);
  const int culprit = find_culprit(group_, where, first == group_.rank_idx() ? peer_rank : first);
  host::give_up_stalled(group_, where, culprit, limit_ns, concat("rank ", peer_rank));
}

void Exchange::end_wait(int64_t start_ns, int peer_rank) {
  sync::store_relaxed(endpoint_.own_workspace().activity().waiting_for, uint32_t{0});
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
