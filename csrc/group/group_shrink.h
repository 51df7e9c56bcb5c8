#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/peer_link.h"
#include "core/sync.h"
#include "group/shrink_members.h"
#include "group/wait_site.h"

namespace moe::group {

class Group;

/// What the ranks that go on agreed on.
struct ShrinkDecision {
  std::vector<int> failed_ranks;
  std::vector<int> survivors;  ///< ascending; this rank is one of them
  /// Per buffer, last that completed on every survivor, -1 for none.
  std::vector<int64_t> completed_epochs;
};

/// How the ranks of a group leave it together for a new one, of which ranks declared failed are no
/// part: first they agree on who goes on, then they make the new group over the old sockets, then
/// they make sure that all of them have it.
///
/// Every rank says where it stands in ballots: (round, whether it has the new group of that round,
/// and of every rank whether it has failed). A round is decided once every rank outside its failed
/// set says the same. A rank that cannot make the group of its round, because a survivor is gone,
/// opens the next one. If all survivors have the group, it counts, although another of its ranks
/// may have died by then: the next operation finds that. No round has two groups: a rank that makes
/// one waits for a word of all its ranks, and a rank that is to decide otherwise in that round
/// needs the word of one that does not give it. Failed sets only grow. What a rank outside the
/// failed set reports counts; what a rank inside it says is not heeded, so no promise made without
/// it can be overtaken by it.
///
/// Where ranks that are not known to have ended stay behind, at most one side may go on: the
/// majority of those not known to have ended, of two halves the one with the lowest rank. A rank
/// that is named by another side that may go on, and does not take that side for failed itself, is
/// evicted: it says so to everybody, which counts as its end, and throws Evicted from then on.
///
/// Thread-safe, except that agree(), all_gather() and finish() are called by one thread at a time.
class ShrinkAgreement {
 public:
  struct Arguments {
    std::vector<int> failed_ranks;  ///< that this rank reports
    std::string call = "shrink";    ///< what the caller called: "shrink" or "grow"
    std::string agreed;             ///< its arguments that have to be equal on every survivor
    std::string problem;            ///< what is wrong with the call of this rank; "" if nothing
    bool needs_majority = true;
  };

  explicit ShrinkAgreement(Group& group);

  /// Brings the operations of this rank to an end and agrees on who goes on. Collective over the
  /// survivors. A call that ended by PeerTimeout may be repeated, with more failed ranks.
  /// @throws InvalidArgument  a rank had a problem, or `agreed` differs; on every rank.
  /// @throws Evicted  this rank is not one of those that go on.
  /// @throws PeerFailed  too few ranks would go on; on each of them.
  /// @throws PeerTimeout  a rank did not call in the group's arrival limit.
  ShrinkDecision agree(const Arguments& arguments, const std::function<void()>& interrupt_check);

  /// Every survivor's payload, in their order. Collective over the survivors.
  /// @throws PeerFailed  a survivor died or does not go on with this round: call finish(false).
  std::vector<std::string> all_gather(const std::string& payload,
                                      const std::function<void()>& interrupt_check);

  /// Throws PeerFailed where all_gather() would, for a caller that waits elsewhere for survivors.
  void check_round();

  /// Says that this rank has the new group, or could not make it because a survivor is gone.
  /// @return Nothing once every survivor of the round has it; else what they agreed on instead, for
  ///   which the group has to be made anew.
  std::optional<ShrinkDecision> finish(bool has_group,
                                       const std::function<void()>& interrupt_check);

  /// Ends the attempt on every rank, between agree() and finish(): the others throw InvalidArgument
  /// with @p text, or PeerFailed where it is no mistake.
  /// @return Whether this ended it; not where another rank has done so before.
  bool refuse(const std::string& text, bool is_mistake);

  /// Whether this rank has called, and the attempt has not ended.
  bool is_unfinished() const { return is_unfinished_.load(std::memory_order_relaxed); }

  /// Throws Evicted where a peer that this rank does not take for failed takes this rank for it.
  void check_evicted();
  /// Throws PeerFailed where a peer has left @p what for the other kind of call.
  void check_nobody_shrinks(const char* what);

 private:
  static constexpr uint32_t kNoRound = ~uint32_t{0};

  struct Ballot {
    uint32_t round = 0;
    uint32_t has_group = 0;
    std::string members;  ///< by rank, whether it has failed, and whether it is known to have ended
  };
  /// What a rank has said last.
  struct Statement {
    std::string call() const { return agreed.substr(0, agreed.find('(')); }

    bool has_spoken = false;
    bool has_resigned = false;
    Ballot ballot;
    uint32_t needs_majority = 1;
    std::string agreed;  ///< the call with its arguments: "grow(num_new_ranks=1)"
    std::string epochs;  ///< BufferEpochs, one after the other
  };

  std::optional<ShrinkDecision> await(const std::function<void()>& interrupt_check,
                                      int64_t limit_ns,
                                      const std::string& deed);
  WaitSite site(const std::function<void()>& interrupt_check) const;
  void find_failed_locked(const std::vector<PeerState>& states, std::string* members) const;
  bool step_locked(std::optional<ShrinkDecision>* decision);
  bool is_unanimous_locked() const;
  bool has_majority_locked();
  void check_agreed_locked();
  ShrinkDecision decide_locked();
  void become_done_locked();
  void say_locked();
  void hear_locked();
  void hear_ballot_locked(int peer_rank, const std::string& message, bool is_heeded);
  /// Whether what a rank says of others can come to be: too few could declare everybody failed.
  static bool counts(const Statement& statement) {
    return statement.needs_majority == 0 || have_majority(statement.ballot.members);
  }
  void resign_locked();
  void end_attempt_locked(const std::string& text);
  void throw_outcome_locked();
  [[noreturn]] void throw_refusal_locked(const std::string& text) const;
  [[noreturn]] void throw_evicted_locked() const;
  void post(const std::string& message);
  bool is_failed_locked(int rank_idx) const;
  int first_missing_locked() const;
  void abort_evicted(const std::vector<int>& ranks);

  Group& group_;
  std::atomic<bool> is_unfinished_{false};
  sync::Mutex mutex_;
  uint32_t attempt_ = 0;               ///< those before it ended by a refusal
  std::vector<Statement> statements_;  ///< by rank; this rank's own is what it says itself
  std::string reported_;               ///< by rank, whether the caller takes it for failed
  bool needs_majority_ = true;
  bool is_decided_ = false;  ///< the round of the own ballot
  bool is_done_ = false;     ///< every survivor has the new group
  uint32_t built_round_ = kNoRound;
  int64_t short_since_ns_ = 0;  ///< when too few were found to go on; 0 if they are not
  uint32_t gather_idx_ = 0;
  std::vector<int> survivors_;
  std::string call_ = "shrink";  ///< the one that this rank is in, or was in last
  std::string ended_by_;         ///< the refusal that ended the attempt before this one
  std::string refusal_;          ///< what ended an attempt of which the caller has not heard
  bool is_evicted_ = false;
  int named_by_ = -1;  ///< who takes this rank for failed
  int64_t named_after_ = -1;
};

}  // namespace moe::group
