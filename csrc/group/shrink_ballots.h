#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/sync.h"
#include "group/membership.h"
#include "group/shrink_members.h"

namespace moe::group {

/// Agreement of the ranks that go on.
struct ShrinkDecision {
  std::vector<int> failed_ranks;
  std::vector<int> survivors;  ///< ascending; this rank is one of them
  /// Per buffer, last that completed on every survivor, -1 for none.
  std::vector<int64_t> completed_epochs;
};

/// Statements of ranks while survivors of failures agree, and what follows; ShrinkAgreement
/// waits for that.
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
/// Lets at most one side go on where ranks that are not known to have ended stay behind: the
/// majority of those not known to have ended, of two halves the one with the lowest rank. A rank
/// that is named by another side that may go on, and does not take that side for failed itself, is
/// evicted: it says so to everybody, which counts as its end, and throws Evicted from then on.
///
/// Thread-safe, except that begin() to survivors() are called by one thread at a time.
class ShrinkBallots {
 public:
  struct Arguments {
    std::vector<int> failed_ranks;  ///< ranks that this rank reports
    std::string call = "shrink";    ///< function that the caller called: "shrink" or "grow"
    std::string agreed;   ///< arguments of the call that have to be equal on every survivor
    std::string problem;  ///< problem with the call of this rank; "" for none
    bool needs_majority = true;
  };

  explicit ShrinkBallots(const Membership& ranks);

  /// This rank has called. @return Those that it reports failed and that live.
  /// @throws InvalidArgument  it had a problem; on every rank.
  std::vector<int> begin(const Arguments& arguments);
  /// Its operations have ended, at @p epochs: one BufferEpochs per buffer.
  void open_round(std::string epochs);
  /// The round was decided, and this rank has its group or cannot make it.
  void end_round(bool has_group);
  /// Hears what peers said and answers.
  /// @return Whether a round is decided, or every survivor has the new group: then no @p decision.
  bool step(std::optional<ShrinkDecision>* decision);
  /// @param has_failed  Set to whether any rank has.
  /// @return The first rank that step() waits for, or -1.
  int first_missing(bool* has_failed) const;
  /// Number of the next message between survivors of the round.
  uint64_t next_gather();
  const std::string& call() const { return call_; }
  const std::vector<int>& survivors() const { return survivors_; }

  /// Throws PeerFailed where a survivor died or does not go on with this round.
  void check_round();

  /// Ends the attempt on every rank, between agree() and finish(): the others throw InvalidArgument
  /// with @p text, or PeerFailed where it is no mistake.
  /// @return Whether this ended it; not where another rank has done so before.
  bool refuse(const std::string& text, bool is_mistake);

  /// Returns whether this rank has called, and the attempt has not ended.
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
  /// Last statement of a rank.
  struct Statement {
    std::string call() const { return agreed.substr(0, agreed.find('(')); }

    bool has_spoken = false;
    bool has_resigned = false;
    Ballot ballot;
    uint32_t needs_majority = 1;
    std::string agreed;  ///< the call with its arguments: "grow(num_new_ranks=1)"
    std::string epochs;  ///< BufferEpochs, one after the other
  };

  /// Returns whether a rank has said what is in @p ballot, or more.
  static bool has_said(const Statement& statement, const Ballot& ballot) {
    return statement.has_spoken && statement.ballot.round >= ballot.round &&
           statement.ballot.has_group >= ballot.has_group &&
           have_same_failed(statement.ballot.members, ballot.members);
  }
  void find_failed_locked(const std::vector<PeerState>& states, std::string* members) const;
  bool is_unanimous_locked() const;
  bool has_majority_locked();
  void check_agreed_locked();
  ShrinkDecision decide_locked();
  void become_done_locked();
  void say_locked();
  void hear_locked();
  void hear_ballot_locked(int peer_rank, const std::string& message, bool is_heeded);
  /// Returns whether what a rank says of others can come to be: too few could declare everybody
  /// failed.
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

  const Membership& ranks_;
  std::atomic<bool> is_unfinished_{false};
  mutable sync::Mutex mutex_;
  uint32_t attempt_ = 0;  ///< number of this attempt; those before it ended by a refusal
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
  std::string refusal_;  ///< refusal that ended an attempt of which the caller has not heard
  bool is_evicted_ = false;
  int named_by_ = -1;  ///< rank that takes this one for failed; -1 for none
  int64_t named_after_ = -1;
};

}  // namespace moe::group
