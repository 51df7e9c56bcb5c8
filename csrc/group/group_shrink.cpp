#include "group/group_shrink.h"

#include <algorithm>
#include <utility>

#include "core/rank_list.h"
#include "group/peer_wait.h"
#include "group/recovery.h"

namespace moe::group {

namespace {

constexpr const char* kCallAgain = "; call shrink() with it among failed_ranks";

}  // namespace

ShrinkDecision ShrinkAgreement::agree(const Arguments& arguments,
                                      const InterruptCheck& interrupt_check) {
  peers_.check_process(arguments.call.c_str());
  peers_.mail().entries()->add_caller();
  const std::vector<int> living = ballots_.begin(arguments);
  if (!living.empty())
    abort_evicted(living);
  recovery_.end_operations(interrupt_check, arguments.call.c_str());
  ballots_.open_round(recovery_.own_epochs());
  return *await(
      interrupt_check, peers_.arrival_timeout_ns(), concat("call ", ballots_.call(), "()"));
}

std::optional<ShrinkDecision> ShrinkAgreement::finish(bool has_group,
                                                      const InterruptCheck& interrupt_check) {
  ballots_.end_round(has_group);
  return await(
      interrupt_check, peers_.stall_timeout_ns(), concat("finish ", ballots_.call(), "()"));
}

/// Waits until a round is decided, or every survivor has the new group (then returns nothing).
std::optional<ShrinkDecision> ShrinkAgreement::await(const InterruptCheck& interrupt_check,
                                                     int64_t limit_ns,
                                                     const std::string& deed) {
  std::optional<ShrinkDecision> decision;
  const WaitSite where{.interrupt_check = &interrupt_check, .call = ballots_.call().c_str()};
  ArrivalClock arrival(limit_ns);
  std::optional<ShownWait> shown;
  // Not await_peer(): an abort is how ranks come here.
  wait_until(
      peers_,
      [&] { return ballots_.step(&decision); },
      [&] {
        answer_caller(peers_, where);
        const int64_t now_ns = sync::now_ns();
        bool has_failed = false;
        const int missing = ballots_.first_missing(&has_failed);
        if (missing < 0)
          return;
        // A peer that waits for this rank in an operation would never learn that it will not
        // come. Where nobody has failed, the circle is what tells it.
        if (now_ns - arrival.start_ns() > kAbortPatienceNs && has_failed)
          recovery_.abort_to(ballots_.call().c_str());
        if (has_failed)
          shown.reset();
        else if (!shown || shown->peer_rank() != missing)
          shown.emplace(peers_, EntryTable::kLeavingCall, 0, missing, concat("to ", deed));
        // The limit aborts nothing, as in recover().
        if (arrival.has_run_out(peers_, now_ns, missing, [&] { return deed; }))
          throw PeerTimeout(describe_absence(peers_, missing, deed, limit_ns) + kCallAgain,
                            FailureSite{{missing}, ballots_.call(), "idle", -1});
      });
  return decision;
}

std::vector<std::string> ShrinkAgreement::all_gather(const std::string& payload,
                                                     const InterruptCheck& interrupt_check) {
  const uint64_t sequence = ballots_.next_gather();
  const std::vector<int>& survivors = ballots_.survivors();
  std::vector<std::string> payloads(survivors.size());
  for (size_t i = 0; i < survivors.size(); ++i) {
    if (survivors[i] == peers_.rank_idx())
      payloads[i] = payload;
    else
      peers_.post(survivors[i], Topic::kShrink, sequence, payload);
  }
  const WaitSite where{.interrupt_check = &interrupt_check, .call = ballots_.call().c_str()};
  const int64_t limit_ns = peers_.stall_timeout_ns();
  const int64_t start_ns = sync::now_ns();
  for (size_t i = 0; i < survivors.size(); ++i) {
    const int rank = survivors[i];
    if (rank == peers_.rank_idx())
      continue;
    bool has_arrived = false;  // a waiter that looks again may not miss what it has taken
    wait_until(
        peers_,
        [&] {
          if (!has_arrived)
            has_arrived = peers_.take(rank, Topic::kShrink, sequence, &payloads[i]);
          return has_arrived;
        },
        [&] {
          answer_caller(peers_, where);
          ballots_.check_round();
          if (sync::now_ns() - start_ns > limit_ns)
            throw PeerTimeout(
                describe_stall(peers_, where, rank, limit_ns, concat("rank ", rank)) + kCallAgain,
                FailureSite{{rank}, ballots_.call(), "idle", -1});
        });
  }
  return payloads;
}

/// Ends the operations of ranks that live although this rank reports them failed, and of those that
/// wait for them.
void ShrinkAgreement::abort_evicted(const std::vector<int>& ranks) {
  std::vector<int> named{peers_.rank_idx()};
  named.insert(named.end(), ranks.begin(), ranks.end());
  peers_.abort(layout::AbortCause::kEvicted,
               WaitSite{},
               named,
               concat("rank ", peers_.rank_idx(), " declared ", rank_list(ranks), " failed"));
}

}  // namespace moe::group
