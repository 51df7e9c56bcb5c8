#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "group/peers.h"
#include "group/wait_site.h"

namespace moe::group {

class Recovery;

/// Lets the ranks of a group leave it together for a new one, of which ranks declared failed are no
/// part: first they agree on who goes on, then they make the new group over the old sockets, then
/// they make sure that all of them have it.
///
/// Thread-safe, except that agree(), all_gather() and finish() are called by one thread at a time.
class ShrinkAgreement {
 public:
  using Arguments = ShrinkBallots::Arguments;

  ShrinkAgreement(Peers& peers, Recovery& recovery)
      : peers_(peers), ballots_(peers.shrink_ballots()), recovery_(recovery) {}

  /// Brings the operations of this rank to an end and agrees on who goes on. Collective over the
  /// survivors. A call that ended by PeerTimeout may be repeated, with more failed ranks.
  /// @throws InvalidArgument  a rank had a problem, or `agreed` differs; on every rank.
  /// @throws Evicted  this rank is not one of those that go on.
  /// @throws PeerFailed  too few ranks would go on; on each of them.
  /// @throws PeerTimeout  a rank did not call in the group's arrival limit.
  ShrinkDecision agree(const Arguments& arguments, const InterruptCheck& interrupt_check);

  /// Every survivor's payload, in their order. Collective over the survivors.
  /// @throws PeerFailed  a survivor died or does not go on with this round: call finish(false).
  std::vector<std::string> all_gather(const std::string& payload,
                                      const InterruptCheck& interrupt_check);

  /// Says that this rank has the new group, or could not make it because a survivor is gone.
  /// @return Nothing once every survivor of the round has it; else what they agreed on instead, for
  ///   which the group has to be made anew.
  std::optional<ShrinkDecision> finish(bool has_group, const InterruptCheck& interrupt_check);

 private:
  std::optional<ShrinkDecision> await(const InterruptCheck& interrupt_check,
                                      int64_t limit_ns,
                                      const std::string& deed);
  void abort_evicted(const std::vector<int>& ranks);

  Peers& peers_;
  ShrinkBallots& ballots_;
  Recovery& recovery_;
};

}  // namespace moe::group
