#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/sync.h"
#include "group/deadlock_watch.h"
#include "group/grace_times.h"
#include "group/peers.h"
#include "group/wait_policy.h"

// Waits for peers: how a waiter polls, what it checks meanwhile and in which order, how long it
// allows a rank that is gone or late, which rank it blames, and the text of the error. Every wait
// of a rank for others is built from these, on CPUs and devices.

namespace moe::group {

// ---- How a waiter polls.

/// Waits until @p ready() holds: spins, yields, then sleeps on this rank's doorbell.
///
/// @param ready    Loads the flag with acquire order. Called before anything else.
/// @param on_slow  Called now and then while waiting; throws to give up.
template <typename Ready, typename OnSlow>
void wait_until(const Membership& ranks,
                const WaitLadder& ladder,
                Ready&& ready,
                OnSlow&& on_slow) {
  for (int i = 0; i < ladder.num_spins; ++i) {
    if (ready())
      return;
    sync::pause();
  }
  for (int i = 0; i < ladder.num_yields; ++i) {
    if (ready())
      return;
    if (i % 64 == 63)
      on_slow();
    sync::yield();
  }
  while (!ready()) {
    // Aborts and deaths ring the doorbell too: who checks for them after enrolling misses none.
    sync::sleep_unless(ranks.own_doorbell(), kSleepSliceNs, [&] {
      on_slow();
      return ready();
    });
  }
}

template <typename Ready, typename OnSlow>
void wait_until(const Membership& ranks, Ready&& ready, OnSlow&& on_slow) {
  wait_until(ranks, wait_ladder(ranks.has_spare_cores()), ready, on_slow);
}

// ---- What it checks meanwhile.

/// Answers the caller's signals. Their handlers may throw, and may have forked this process or
/// destroyed the communicator.
void answer_caller(const Membership& ranks, const WaitSite& site);

/// Checks that every wait in a working communicator makes now and then, in this order: signals of
/// its caller; @p ready() once more, because a peer may do its part and then abort or leave; an
/// abort, whose cause says more than its consequences; then @p look(now_ns), which checks what only
/// this wait has to fear.
template <typename Ready, typename Look>
void look_up(Peers& peers, const WaitSite& site, Ready&& ready, Look&& look) {
  answer_caller(peers, site);
  if (ready())
    return;
  if (peers.is_aborted()) [[unlikely]] {
    // A peer that has everything of a call may go on and abort: what this rank lacks of it was sent
    // before, and may lie unread in the link.
    peers.link()->catch_up();
    if (ready())
      return;
    peers.throw_abort();
  }
  look(sync::now_ns());
}

/// Waits until @p ready() for peers that may fail; see wait_until() and look_up().
template <typename Ready, typename Look>
void await_peer(
    Peers& peers, const WaitLadder& ladder, const WaitSite& site, Ready&& ready, Look&& look) {
  wait_until(peers, ladder, ready, [&] { look_up(peers, site, ready, look); });
}
template <typename Ready, typename Look>
void await_peer(Peers& peers, const WaitSite& site, Ready&& ready, Look&& look) {
  await_peer(peers, wait_ladder(peers.has_spare_cores()), site, ready, look);
}

// ---- A rank that is gone.

/// Measures how long a condition has held.
class GraceClock {
 public:
  /// Call it while the condition holds. @return whether it has held for longer than @p grace_ns.
  bool has_passed(int64_t now_ns, int64_t grace_ns) {
    if (since_ns_ == 0)
      since_ns_ = now_ns;
    return now_ns - since_ns_ > grace_ns;
  }
  /// Call it when the condition no longer holds.
  void restart() { since_ns_ = 0; }

 private:
  int64_t since_ns_ = 0;
};

/// Grace that one wait allows ranks that are gone.
class GoneWatch {
 public:
  /// For a rank that still owes this wait something. What a local rank stored is visible already;
  /// messages of another node may still be in flight.
  bool has_ended(const Membership& ranks, int gone_rank, int64_t now_ns) {
    return ranks.is_local(gone_rank) || remote_.has_passed(now_ns, kRemoteGraceNs);
  }
  /// For a rank that has entered and owes this wait nothing: if it is dead, others may not be able
  /// to come because of it, and the wait for them ends after a grace.
  bool keeps_others(const Membership& ranks, int gone_rank, int64_t now_ns) {
    return ranks.state(gone_rank) == PeerState::kDead && death_.has_passed(now_ns, kDeathGraceNs);
  }
  /// Call it when messages have arrived: the grace for those in flight begins again.
  void restart() { remote_.restart(); }

 private:
  GraceClock death_;
  GraceClock remote_;
};

/// Aborts and throws because @p peer_rank is gone.
/// @param awaited  Event that this rank waited for, if @p site does not say it; else null.
[[noreturn]] void give_up_gone(Peers& peers,
                               const WaitSite& site,
                               int peer_rank,
                               const char* awaited = nullptr);

/// Gives up if a peer is gone and @p is_missing(peer). The flag is loaded after the state: a peer
/// may store it and then leave in good order.
template <typename IsMissing>
void check_gone(Peers& peers,
                const WaitSite& site,
                IsMissing&& is_missing,
                const char* awaited = nullptr) {
  for (int peer_rank = 0; peer_rank < peers.num_ranks(); ++peer_rank)
    if (peers.is_peer(peer_rank) && peers.state(peer_rank) != PeerState::kAlive &&
        is_missing(peer_rank)) [[unlikely]]
      give_up_gone(peers, site, peer_rank, awaited);
}

// ---- A rank that does not come.

/// "rank 1 did not call recover() within 60 s of rank 0"
/// @param deed  Deed that it has not done: "call recover()".
std::string describe_absence(const Membership& ranks,
                             int peer_rank,
                             const std::string& deed,
                             int64_t limit_ns);

/// Aborts and throws because @p peer_rank did not come within the arrival limit.
[[noreturn]] void give_up_absent(Peers& peers, const WaitSite& site, int peer_rank);

/// Time that this rank has waited for others to come.
class ArrivalClock {
 public:
  explicit ArrivalClock(int64_t limit_ns)
      : limit_ns_(limit_ns), start_ns_(sync::now_ns()), warned_ns_(start_ns_) {}

  /// Called now and then while @p peer_rank has not come: warns once an interval, by name.
  /// @param describe_deed  Returns the deed that it has not done: "call recover()".
  /// @return whether the limit has run out.
  template <typename DescribeDeed>
  bool has_run_out(const Membership& ranks,
                   int64_t now_ns,
                   int peer_rank,
                   DescribeDeed&& describe_deed) {
    if (is_warning_due(now_ns))
      warn_of(ranks, now_ns, peer_rank, describe_deed());
    return now_ns - start_ns_ > limit_ns_;
  }

  int64_t start_ns() const { return start_ns_; }

 private:
  bool is_warning_due(int64_t now_ns) const;
  void warn_of(const Membership& ranks, int64_t now_ns, int peer_rank, const std::string& deed);

  int64_t limit_ns_;
  int64_t start_ns_;
  int64_t warned_ns_;
};

/// A wait for a peer to enter an operation or a collective call.
class ArrivalWatch {
 public:
  /// For waits whose limit a kernel enforces.
  static constexpr int64_t kNoLimit = INT64_MAX;

  /// @param site  The operation and its epoch; outlives this.
  ArrivalWatch(Peers& peers, const WaitSite& site, int peer_rank)
      : ArrivalWatch(peers, site, peer_rank, peers.arrival_timeout_ns()) {}
  ArrivalWatch(Peers& peers, const WaitSite& site, int peer_rank, int64_t limit_ns)
      : peers_(peers),
        site_(site),
        peer_rank_(peer_rank),
        clock_(limit_ns),
        circle_(peers, site, peer_rank, clock_.start_ns()) {}

  /// Called now and then while the peer has not come: warns once an interval, by name; aborts and
  /// throws when the arrival limit has run out, or at once where the peer cannot come.
  /// @param is_missing  Whether a rank has not entered the operation.
  void check(int64_t now_ns, const std::function<bool(int)>& is_missing);

  int peer_rank() const { return peer_rank_; }
  int64_t start_ns() const { return clock_.start_ns(); }

 private:
  Peers& peers_;
  const WaitSite& site_;
  int peer_rank_;
  ArrivalClock clock_;
  DeadlockWatch circle_;
};

// ---- A rank that has come and stopped.

/// "rank 2 made no progress for 30 s in combine of buffer 3, epoch 7, phase data; rank 0 waited for
/// rank 1"
/// @param awaited  Rank or event that this rank waited for: "rank 1".
std::string describe_stall(const Membership& ranks,
                           const WaitSite& site,
                           int culprit,
                           int64_t limit_ns,
                           const std::string& awaited);

/// Aborts and throws because @p culprit made no progress for @p limit_ns.
[[noreturn]] void give_up_stalled(
    Peers& peers, const WaitSite& site, int culprit, int64_t limit_ns, const std::string& awaited);

/// Finds the rank that keeps @p peer_rank waiting. A peer that waits for somebody is not the one to
/// blame: the chain is followed to its end, over all nodes. Every rank is asked, because what a
/// stopped one has written down is old.
int find_culprit(Peers& peers, const WaitSite& site, int peer_rank);

}  // namespace moe::group
