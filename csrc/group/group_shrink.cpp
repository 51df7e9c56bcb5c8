#include "group/group_shrink.h"

#include <algorithm>
#include <utility>

#include "core/rank_list.h"
#include "group/group.h"
#include "group/message.h"
#include "group/peer_wait.h"

namespace moe::group {

namespace {

// A rank that is about to be found dead counts against those who go on until it is.
constexpr int64_t kDeathPatienceNs = 1'000'000'000;

constexpr const char* kCallAgain = "; call shrink() with it among failed_ranks";

}  // namespace

ShrinkAgreement::ShrinkAgreement(Group& group)
    : group_(group),
      statements_(static_cast<size_t>(group.num_ranks())),
      reported_(static_cast<size_t>(group.num_ranks()), '\0') {
  for (Statement& statement : statements_)
    statement.ballot.members = reported_;
}

WaitSite ShrinkAgreement::site(const std::function<void()>& interrupt_check) const {
  WaitSite site;
  site.interrupt_check = &interrupt_check;
  site.call = call_.c_str();
  return site;
}

ShrinkDecision ShrinkAgreement::agree(const Arguments& arguments,
                                      const std::function<void()>& interrupt_check) {
  group_.check_process(arguments.call.c_str());
  group_.mail().entries()->add_caller();
  std::vector<int> living;
  {
    const std::lock_guard<sync::Mutex> lock(mutex_);
    call_ = arguments.call;
    hear_locked();
    throw_outcome_locked();
    if (!arguments.problem.empty()) {
      const std::string text = concat("rank ", group_.rank_idx(), ": ", arguments.problem);
      end_attempt_locked(kMistake + text);
      refusal_.clear();
      throw InvalidArgument(text);
    }
    for (const int rank : arguments.failed_ranks) {
      reported_[static_cast<size_t>(rank)] |= kFailed;
      if (group_.is_active(rank) && group_.state(rank) == PeerState::kAlive)
        living.push_back(rank);
    }
    needs_majority_ = arguments.needs_majority;
    Statement& own = statements_[static_cast<size_t>(group_.rank_idx())];
    own.needs_majority = arguments.needs_majority ? 1 : 0;
    own.agreed = concat(call_, "(", arguments.agreed, ")");
  }
  is_unfinished_.store(true, std::memory_order_relaxed);
  if (!living.empty())
    abort_evicted(living);
  group_.recovery().end_operations(interrupt_check, call_.c_str());
  {
    const std::lock_guard<sync::Mutex> lock(mutex_);
    Statement& own = statements_[static_cast<size_t>(group_.rank_idx())];
    if (is_decided_ || own.ballot.has_group != 0) {  // of an earlier call, which threw
      ++own.ballot.round;
      own.ballot.has_group = 0;
      is_decided_ = false;
    }
    own.epochs = group_.recovery().own_epochs();
    own.has_spoken = false;  // says it again, with what this call knows
    short_since_ns_ = 0;
  }
  return *await(interrupt_check, group_.arrival_timeout_ns(), concat("call ", call_, "()"));
}

std::optional<ShrinkDecision> ShrinkAgreement::finish(
    bool has_group, const std::function<void()>& interrupt_check) {
  {
    const std::lock_guard<sync::Mutex> lock(mutex_);
    throw_outcome_locked();
    if (!is_decided_)  // its end was heard on the way, and no other rank comes here
      throw_refusal_locked(ended_by_);
    Statement& own = statements_[static_cast<size_t>(group_.rank_idx())];
    if (has_group) {
      own.ballot.has_group = 1;
    } else {
      ++own.ballot.round;
      is_decided_ = false;
    }
    own.has_spoken = false;
  }
  return await(interrupt_check, group_.stall_timeout_ns(), concat("finish ", call_, "()"));
}

/// Waits until a round is decided, or every survivor has the new group (then returns nothing).
std::optional<ShrinkDecision> ShrinkAgreement::await(const std::function<void()>& interrupt_check,
                                                     int64_t limit_ns,
                                                     const std::string& deed) {
  std::optional<ShrinkDecision> decision;
  const WaitSite where = site(interrupt_check);
  ArrivalClock arrival(limit_ns);
  std::optional<ShownWait> shown;
  // Not await_peer(): an abort is how ranks come here.
  wait_until(
      group_,
      [&] {
        const std::lock_guard<sync::Mutex> lock(mutex_);
        decision.reset();  // a waiter that looks again may hear of another round
        return step_locked(&decision);
      },
      [&] {
        answer_caller(group_, where);
        const int64_t now_ns = sync::now_ns();
        int missing = -1;
        bool has_failed = false;
        {
          const std::lock_guard<sync::Mutex> lock(mutex_);
          missing = first_missing_locked();
          if (missing < 0)
            return;
          // A peer that waits for this rank in an operation would never learn that it will not
          // come. Where nobody has failed, the circle is what tells it.
          const Statement& own = statements_[static_cast<size_t>(group_.rank_idx())];
          has_failed = !ranks_with(own.ballot.members, kFailed).empty();
          if (now_ns - arrival.start_ns() > kAbortPatienceNs && has_failed)
            group_.recovery().abort_to(call_.c_str());
        }
        if (has_failed)
          shown.reset();
        else if (!shown || shown->peer_rank() != missing)
          shown.emplace(group_, EntryTable::kLeavingCall, 0, missing, concat("to ", deed));
        // Not under the lock: what hears the warning may call here. As in recover(), the limit
        // aborts nothing.
        if (arrival.has_run_out(group_, now_ns, missing, [&] { return deed; }))
          throw PeerTimeout(describe_absence(group_, missing, deed, limit_ns) + kCallAgain,
                            FailureSite{{missing}, call_, "idle", -1});
      });
  return decision;
}

/// Marks who has failed by what this rank sees of it.
/// @param states  [num_ranks], seen before what peers said last was heard
void ShrinkAgreement::find_failed_locked(const std::vector<PeerState>& states,
                                         std::string* members) const {
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    const Statement& statement = statements_[idx];
    // A rank that went on without this one has left as well.
    const bool names_this =
        statement.has_spoken && counts(statement) &&
        (statement.ballot.members[static_cast<size_t>(group_.rank_idx())] & kFailed) != 0;
    if (!group_.is_active(peer_rank) || statement.has_resigned ||
        (states[idx] == PeerState::kLeft && !names_this))
      (*members)[idx] |= kFailed | kEnded;
    else if (states[idx] == PeerState::kLeft)
      (*members)[idx] |= kFailed;
    else if (states[idx] == PeerState::kDead)
      // Where nothing answers any more, it may be the link that has ended.
      (*members)[idx] = static_cast<char>(
          (*members)[idx] | kFailed |
          (group_.link()->is_link_lost(group_.link_rank(peer_rank)) ? 0 : kEnded));
  }
}

/// Hears what peers said and answers; @return whether the wait is over.
bool ShrinkAgreement::step_locked(std::optional<ShrinkDecision>* decision) {
  // Before what they said last is heard: a rank that has the new group says so and leaves.
  std::vector<PeerState> states;
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank)
    states.push_back(peer_rank == group_.rank_idx() ? PeerState::kAlive : group_.state(peer_rank));
  hear_locked();
  throw_outcome_locked();
  if (is_done_)
    return true;
  Statement& own = statements_[static_cast<size_t>(group_.rank_idx())];
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

/// Whether every rank outside the own failed set has said what this rank says, or more of the same
/// round.
bool ShrinkAgreement::is_unanimous_locked() const {
  const Ballot& own = statements_[static_cast<size_t>(group_.rank_idx())].ballot;
  for (size_t idx = 0; idx < statements_.size(); ++idx) {
    if ((own.members[idx] & kFailed) != 0)
      continue;
    const Statement& statement = statements_[idx];
    if (!statement.has_spoken || statement.ballot.round != own.round ||
        !have_same_failed(statement.ballot.members, own.members) ||
        statement.ballot.has_group < own.has_group)
      return false;
  }
  return true;
}

/// Whether at most one group can come of this; refuses once patience is over.
bool ShrinkAgreement::has_majority_locked() {
  const std::string& members = statements_[static_cast<size_t>(group_.rank_idx())].ballot.members;
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

void ShrinkAgreement::check_agreed_locked() {
  const Statement& own = statements_[static_cast<size_t>(group_.rank_idx())];
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

ShrinkDecision ShrinkAgreement::decide_locked() {
  const std::string& members = statements_[static_cast<size_t>(group_.rank_idx())].ballot.members;
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

void ShrinkAgreement::throw_outcome_locked() {
  if (is_evicted_)
    throw_evicted_locked();
  if (refusal_.empty())
    return;
  throw_refusal_locked(std::exchange(refusal_, {}));
}

void ShrinkAgreement::throw_refusal_locked(const std::string& text) const {
  if (text[0] == kFailure) {
    const auto num_ranks = static_cast<size_t>(group_.num_ranks());
    throw PeerFailed(
        text.substr(1 + num_ranks),
        FailureSite{ranks_with(text.substr(1, num_ranks), kFailed), call_, "idle", -1});
  }
  throw InvalidArgument(text.substr(1));
}

void ShrinkAgreement::throw_evicted_locked() const {
  throw Evicted(concat("rank ",
                       named_by_,
                       " declared rank ",
                       group_.rank_idx(),
                       ", which is this one, failed, and goes on without it (shrink, after epoch ",
                       named_after_,
                       " of its first buffer)"),
                FailureSite{{named_by_}, "shrink", "idle", named_after_});
}

bool ShrinkAgreement::refuse(const std::string& text, bool is_mistake) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  if (!is_decided_)
    return false;
  const std::string& members = statements_[static_cast<size_t>(group_.rank_idx())].ballot.members;
  end_attempt_locked(is_mistake ? kMistake + text : kFailure + members + text);
  refusal_.clear();
  return true;
}

void ShrinkAgreement::check_evicted() {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  if (is_done_)
    return;
  hear_locked();
  if (is_evicted_)
    throw_evicted_locked();
}

void ShrinkAgreement::check_nobody_shrinks(const char* what) {
  check_evicted();
  const std::lock_guard<sync::Mutex> lock(mutex_);
  for (size_t idx = 0; idx < statements_.size(); ++idx)
    if (static_cast<int>(idx) != group_.rank_idx() && statements_[idx].has_spoken)
      throw PeerFailed(concat("rank ",
                              idx,
                              " called ",
                              statements_[idx].call(),
                              "() while rank ",
                              group_.rank_idx(),
                              " was in ",
                              what,
                              "()"),
                       FailureSite{{static_cast<int>(idx)}, what, "idle", -1});
}

void ShrinkAgreement::check_round() {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  hear_locked();
  throw_outcome_locked();
  const Ballot& own = statements_[static_cast<size_t>(group_.rank_idx())].ballot;
  for (const int rank : survivors_) {
    const Statement& statement = statements_[static_cast<size_t>(rank)];
    const bool is_gone = rank != group_.rank_idx() &&
                         (statement.has_resigned || group_.state(rank) != PeerState::kAlive);
    if (is_gone || statement.ballot.round > own.round ||
        (statement.ballot.round == own.round &&
         !have_same_failed(statement.ballot.members, own.members)))
      throw PeerFailed(
          is_gone ? concat("rank ", rank, " ended during ", call_, "()")
                  : concat("rank ", rank, " found another rank failed during ", call_, "()"),
          FailureSite{{rank}, call_, "idle", -1});
  }
}

std::vector<std::string> ShrinkAgreement::all_gather(const std::string& payload,
                                                     const std::function<void()>& interrupt_check) {
  uint64_t sequence = 0;
  {
    const std::lock_guard<sync::Mutex> lock(mutex_);
    sequence = gather_sequence(
        attempt_, statements_[static_cast<size_t>(group_.rank_idx())].ballot.round, gather_idx_++);
  }
  std::vector<std::string> payloads(survivors_.size());
  for (size_t i = 0; i < survivors_.size(); ++i) {
    if (survivors_[i] == group_.rank_idx())
      payloads[i] = payload;
    else
      group_.post(survivors_[i], Topic::kShrink, sequence, payload);
  }
  const WaitSite where = site(interrupt_check);
  const int64_t limit_ns = group_.stall_timeout_ns();
  const int64_t start_ns = sync::now_ns();
  for (size_t i = 0; i < survivors_.size(); ++i) {
    const int rank = survivors_[i];
    if (rank == group_.rank_idx())
      continue;
    bool has_arrived = false;  // a waiter that looks again may not miss what it has taken
    wait_until(
        group_,
        [&] {
          if (!has_arrived)
            has_arrived = group_.take(rank, Topic::kShrink, sequence, &payloads[i]);
          return has_arrived;
        },
        [&] {
          answer_caller(group_, where);
          check_round();
          if (sync::now_ns() - start_ns > limit_ns)
            throw PeerTimeout(
                describe_stall(group_, where, rank, limit_ns, concat("rank ", rank)) + kCallAgain,
                FailureSite{{rank}, call_, "idle", -1});
        });
  }
  return payloads;
}

bool ShrinkAgreement::is_failed_locked(int rank_idx) const {
  const auto idx = static_cast<size_t>(rank_idx);
  const std::string& members = statements_[static_cast<size_t>(group_.rank_idx())].ballot.members;
  return ((members[idx] | reported_[idx]) & kFailed) != 0;
}

/// The first rank that this one waits for, or -1.
int ShrinkAgreement::first_missing_locked() const {
  const Ballot& own = statements_[static_cast<size_t>(group_.rank_idx())].ballot;
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    const Statement& statement = statements_[static_cast<size_t>(peer_rank)];
    if (peer_rank == group_.rank_idx() || is_failed_locked(peer_rank) ||
        group_.state(peer_rank) != PeerState::kAlive)
      continue;
    if (!statement.has_spoken || statement.ballot.round < own.round ||
        statement.ballot.has_group < own.has_group ||
        !have_same_failed(statement.ballot.members, own.members))
      return peer_rank;
  }
  return -1;
}

/// Ends the operations of ranks that live although this rank reports them failed, and of those that
/// wait for them.
void ShrinkAgreement::abort_evicted(const std::vector<int>& ranks) {
  std::vector<int> named{group_.rank_idx()};
  named.insert(named.end(), ranks.begin(), ranks.end());
  group_.abort(layout::AbortCause::kEvicted,
               WaitSite{},
               named,
               concat("rank ", group_.rank_idx(), " declared ", rank_list(ranks), " failed"));
}

}  // namespace moe::group
