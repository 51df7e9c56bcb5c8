#include "group/shrink_ballots.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/rank_list.h"
#include "group/grace_times.h"
#include "group/message.h"

namespace moe::group {

ShrinkBallots::ShrinkBallots(const Membership& ranks)
    : ranks_(ranks),
      statements_(static_cast<size_t>(ranks.num_ranks())),
      reported_(static_cast<size_t>(ranks.num_ranks()), '\0') {
  for (Statement& statement : statements_)
    statement.ballot.members = reported_;
}

std::vector<int> ShrinkBallots::begin(const Arguments& arguments) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  call_ = arguments.call;
  hear_locked();
  throw_outcome_locked();
  if (!arguments.problem.empty()) {
    const std::string text = concat("rank ", ranks_.rank_idx(), ": ", arguments.problem);
    end_attempt_locked(kMistake + text);
    refusal_.clear();
    throw InvalidArgument(text);
  }
  std::vector<int> living;
  for (const int rank : arguments.failed_ranks) {
    reported_[static_cast<size_t>(rank)] |= kFailed;
    if (ranks_.is_active(rank) && ranks_.state(rank) == PeerState::kAlive)
      living.push_back(rank);
  }
  needs_majority_ = arguments.needs_majority;
  Statement& own = statements_[ranks_.own_idx()];
  own.needs_majority = arguments.needs_majority ? 1 : 0;
  own.agreed = concat(call_, "(", arguments.agreed, ")");
  is_unfinished_.store(true, std::memory_order_relaxed);
  return living;
}

void ShrinkBallots::open_round(std::string epochs) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  Statement& own = statements_[ranks_.own_idx()];
  if (is_decided_ || own.ballot.has_group != 0) {  // of an earlier call, which threw
    ++own.ballot.round;
    own.ballot.has_group = 0;
    is_decided_ = false;
  }
  own.epochs = std::move(epochs);
  own.has_spoken = false;  // says it again, with what this call knows
  short_since_ns_ = 0;
}

void ShrinkBallots::end_round(bool has_group) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  throw_outcome_locked();
  if (!is_decided_)  // its end was heard on the way, and no other rank comes here
    throw_refusal_locked(ended_by_);
  Statement& own = statements_[ranks_.own_idx()];
  if (has_group) {
    own.ballot.has_group = 1;
  } else {
    ++own.ballot.round;
    is_decided_ = false;
  }
  own.has_spoken = false;
}

uint64_t ShrinkBallots::next_gather() {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  return gather_sequence(attempt_, statements_[ranks_.own_idx()].ballot.round, gather_idx_++);
}

/// Marks who has failed by what this rank sees of it.
/// @param states  [num_ranks], seen before what peers said last was heard
void ShrinkBallots::find_failed_locked(const std::vector<PeerState>& states,
                                       std::string* members) const {
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    const Statement& statement = statements_[idx];
    // A rank that went on without this one has left as well.
    const bool names_this = statement.has_spoken && counts(statement) &&
                            (statement.ballot.members[ranks_.own_idx()] & kFailed) != 0;
    if (!ranks_.is_active(peer_rank) || statement.has_resigned ||
        (states[idx] == PeerState::kLeft && !names_this))
      (*members)[idx] |= kFailed | kEnded;
    else if (states[idx] == PeerState::kLeft)
      (*members)[idx] |= kFailed;
    else if (states[idx] == PeerState::kDead)
      // It may be the link that has ended where nothing answers any more.
      (*members)[idx] = static_cast<char>(
          (*members)[idx] | kFailed |
          (ranks_.link()->is_link_lost(ranks_.link_rank(peer_rank)) ? 0 : kEnded));
  }
}

bool ShrinkBallots::step(std::optional<ShrinkDecision>* decision) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  decision->reset();  // a waiter that looks again may hear of another round
  // Before what they said last is heard: a rank that has the new group says so and leaves.
  std::vector<PeerState> states;
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank)
    states.push_back(peer_rank == ranks_.rank_idx() ? PeerState::kAlive : ranks_.state(peer_rank));
  hear_locked();
  throw_outcome_locked();
  if (is_done_)
    return true;
  Statement& own = statements_[ranks_.own_idx()];
  const Ballot before = own.ballot;
  std::string& members = own.ballot.members;
  unite(&members, reported_);
  find_failed_locked(states, &members);
  for (size_t idx = 0; idx < statements_.size(); ++idx)
    if ((members[idx] & kFailed) == 0 && statements_[idx].has_spoken && counts(statements_[idx]))
      unite(&members, statements_[idx].ballot.members);
  bool has_heard_all = true;
  for (size_t idx = 0; idx < statements_.size(); ++idx)
    if ((members[idx] & kFailed) == 0) {
      own.ballot.round = std::max(own.ballot.round, statements_[idx].ballot.round);
      has_heard_all = has_heard_all && statements_[idx].has_spoken;
    }
  if (own.ballot.round != before.round) {
    own.ballot.has_group = 0;
    is_decided_ = false;
  }
  if (!own.has_spoken || own.ballot.round != before.round || members != before.members)
    say_locked();
  if (own.ballot.has_group != 0) {
    if (!is_unanimous_locked())
      return false;
    become_done_locked();
    return true;
  }
  if (!is_unanimous_locked()) {
    if (counts(own))
      short_since_ns_ = 0;
    else if (has_heard_all)  // nobody joins those who are too few
      has_majority_locked();
    return false;
  }
  check_agreed_locked();
  if (!has_majority_locked())
    return false;
  *decision = decide_locked();
  return true;
}

int ShrinkBallots::first_missing(bool* has_failed) const {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  const Ballot& own = statements_[ranks_.own_idx()].ballot;
  *has_failed = !ranks_with(own.members, kFailed).empty();
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank)
    if (peer_rank != ranks_.rank_idx() && !is_failed_locked(peer_rank) &&
        ranks_.state(peer_rank) == PeerState::kAlive &&
        !has_said(statements_[static_cast<size_t>(peer_rank)], own))
      return peer_rank;
  return -1;
}

/// Returns whether every rank outside the own failed set has said what this rank says.
bool ShrinkBallots::is_unanimous_locked() const {
  const Ballot& own = statements_[ranks_.own_idx()].ballot;
  for (size_t idx = 0; idx < statements_.size(); ++idx)
    if ((own.members[idx] & kFailed) == 0 && !has_said(statements_[idx], own))
      return false;
  return true;
}

/// Returns whether at most one group can come of this; refuses once patience is over.
bool ShrinkBallots::has_majority_locked() {
  const std::string& members = statements_[ranks_.own_idx()].ballot.members;
  if (!needs_majority_ || have_majority(members))
    return true;
  const int64_t now_ns = sync::now_ns();
  if (short_since_ns_ == 0)
    short_since_ns_ = now_ns;
  if (now_ns - short_since_ns_ < kDeathPatienceNs)
    return false;
  const std::vector<int> possible = ranks_without(members, kEnded);
  std::vector<int> silent;
  for (const int rank : possible)
    if ((members[static_cast<size_t>(rank)] & kFailed) != 0)
      silent.push_back(rank);
  end_attempt_locked(
      kFailure + std::string(members.size(), '\0') +
      concat(rank_list(ranks_without(members, kFailed)),
             " may not go on without ",
             rank_list(silent),
             ", which may live and do the same: they are too few of ",
             possible.size(),
             " ranks; end those processes and shrink again, or pass require_majority=False"));
  throw_outcome_locked();
  return false;
}

void ShrinkBallots::check_agreed_locked() {
  const Statement& own = statements_[ranks_.own_idx()];
  const std::vector<int> survivors = ranks_without(own.ballot.members, kFailed);
  const Statement& first = statements_[static_cast<size_t>(survivors[0])];
  for (const int rank : survivors) {
    const Statement& statement = statements_[static_cast<size_t>(rank)];
    if (statement.agreed == first.agreed)
      continue;
    end_attempt_locked(kMistake + concat("ranks call differently: rank ",
                                         survivors[0],
                                         " ",
                                         first.agreed,
                                         ", rank ",
                                         rank,
                                         " ",
                                         statement.agreed));
    throw_outcome_locked();
  }
}

ShrinkDecision ShrinkBallots::decide_locked() {
  const std::string& members = statements_[ranks_.own_idx()].ballot.members;
  ShrinkDecision decision{ranks_with(members, kFailed), ranks_without(members, kFailed), {}};
  std::map<uint64_t, uint64_t> completed;
  for (const int rank : decision.survivors) {
    const std::string& epochs = statements_[static_cast<size_t>(rank)].epochs;
    for (size_t position = 0; position < epochs.size();) {
      const auto buffer = read_value<BufferEpochs>(epochs, &position);
      uint64_t& last = completed.emplace(buffer.buffer_number, buffer.last_completed).first->second;
      last = std::min(last, buffer.last_completed);
    }
  }
  for (const auto& [number, last] : completed)
    decision.completed_epochs.push_back(last == 0 ? -1 : static_cast<int64_t>(last));
  is_decided_ = true;
  gather_idx_ = 0;
  survivors_ = decision.survivors;
  return decision;
}

void ShrinkBallots::throw_outcome_locked() {
  if (is_evicted_)
    throw_evicted_locked();
  if (refusal_.empty())
    return;
  throw_refusal_locked(std::exchange(refusal_, {}));
}

void ShrinkBallots::throw_refusal_locked(const std::string& text) const {
  if (text[0] == kFailure) {
    const auto num_ranks = static_cast<size_t>(ranks_.num_ranks());
    throw PeerFailed(
        text.substr(1 + num_ranks),
        FailureSite{ranks_with(text.substr(1, num_ranks), kFailed), call_, "idle", -1});
  }
  throw InvalidArgument(text.substr(1));
}

void ShrinkBallots::throw_evicted_locked() const {
  throw Evicted(concat("rank ",
                       named_by_,
                       " declared rank ",
                       ranks_.rank_idx(),
                       ", which is this one, failed, and goes on without it (shrink, after epoch ",
                       named_after_,
                       " of its first buffer)"),
                FailureSite{{named_by_}, "shrink", "idle", named_after_});
}

bool ShrinkBallots::refuse(const std::string& text, bool is_mistake) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  if (!is_decided_)
    return false;
  const std::string& members = statements_[ranks_.own_idx()].ballot.members;
  end_attempt_locked(is_mistake ? kMistake + text : kFailure + members + text);
  refusal_.clear();
  return true;
}

void ShrinkBallots::check_evicted() {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  if (is_done_)
    return;
  hear_locked();
  if (is_evicted_)
    throw_evicted_locked();
}

void ShrinkBallots::check_nobody_shrinks(const char* what) {
  check_evicted();
  const std::lock_guard<sync::Mutex> lock(mutex_);
  for (size_t idx = 0; idx < statements_.size(); ++idx)
    if (static_cast<int>(idx) != ranks_.rank_idx() && statements_[idx].has_spoken)
      throw PeerFailed(concat("rank ",
                              idx,
                              " called ",
                              statements_[idx].call(),
                              "() while rank ",
                              ranks_.rank_idx(),
                              " was in ",
                              what,
                              "()"),
                       FailureSite{{static_cast<int>(idx)}, what, "idle", -1});
}

void ShrinkBallots::check_round() {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  hear_locked();
  throw_outcome_locked();
  const Ballot& own = statements_[ranks_.own_idx()].ballot;
  for (const int rank : survivors_) {
    const Statement& statement = statements_[static_cast<size_t>(rank)];
    const bool is_gone = rank != ranks_.rank_idx() &&
                         (statement.has_resigned || ranks_.state(rank) != PeerState::kAlive);
    if (is_gone || statement.ballot.round > own.round ||
        (statement.ballot.round == own.round &&
         !have_same_failed(statement.ballot.members, own.members)))
      throw PeerFailed(
          is_gone ? concat("rank ", rank, " ended during ", call_, "()")
                  : concat("rank ", rank, " found another rank failed during ", call_, "()"),
          FailureSite{{rank}, call_, "idle", -1});
  }
}

bool ShrinkBallots::is_failed_locked(int rank_idx) const {
  const auto idx = static_cast<size_t>(rank_idx);
  const std::string& members = statements_[ranks_.own_idx()].ballot.members;
  return ((members[idx] | reported_[idx]) & kFailed) != 0;
}

}  // namespace moe::group
