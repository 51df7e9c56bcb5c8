#include <algorithm>
#include <cstring>

#include "group/group.h"
#include "group/message.h"
#include "group/peer_wait.h"

// How the living agree. Every rank proposes which ranks have failed, and at which epochs its own
// buffers stand; it proposes again whenever it learns of another failure. A rank that sees the same
// set proposed by everybody outside that set commits to it, tells the others, and never goes back
// on it; a rank that hears of a commitment makes it its own, unless it has proposed that whoever
// commits has failed: others may have agreed on that. The call ends when every living rank
// has committed. A rank that dies after somebody committed is found by the next operation, and
// excluded by the next recovery.

namespace moe::host {

namespace {

constexpr char kProposal = 'p';
constexpr char kCommitment = 'c';

}  // namespace

// A message of the recovery: [0] kind; [1, 1 + num_ranks) 1 for each failed rank; uint64 next
// sequence of all_gather(); then one BufferEpochs per buffer.

RecoveryResult Group::recover(const InterruptCheck& interrupt_check) {
  check_process("recover");
  const auto count = static_cast<size_t>(num_ranks());
  recovery_.proposals.resize(count);
  recovery_.has_committed.resize(count);
  is_recovery_unfinished_.store(true, std::memory_order_relaxed);
  end_operations(interrupt_check, "recover");
  constexpr const char* kDeed = "call recover()";
  WaitSite site;
  site.interrupt_check = &interrupt_check;
  site.call = "recover";
  ArrivalClock arrival(arrival_timeout_ns_);
  GraceClock since_decision;
  // Not await_peer(): what aborted the communicator is what this call is for.
  wait_until(
      *this,
      [this] { return step_recovery(); },
      [&] {
        answer_caller(*this, site);
        const int64_t now_ns = sync::now_ns();
        // A rank may have given this call up before all had committed.
        if (!recovery_.decision.empty() && since_decision.has_passed(now_ns, kAbortPatienceNs))
          shrink_agreement_->check_nobody_shrinks("recover");
        if (now_ns - arrival.start_ns() > kAbortPatienceNs)
          abort_to("recover");
        const int missing = first_missing_in_recovery();
        // Nobody waits for this rank in an operation: the limit ends this call, which may be made
        // again, and aborts nothing.
        if (missing >= 0 && arrival.has_run_out(*this, now_ns, missing, [] { return kDeed; }))
          throw PeerTimeout(describe_absence(*this, missing, kDeed, arrival_timeout_ns_),
                            FailureSite{{missing}, "recover", "idle", -1});
      });
  recovery_ = Recovery{};
  {
    const std::lock_guard<sync::Mutex> lock(mail_mutex_);
    // The living have committed, hence have sent every abort that this recovery ends.
    take_remote_aborts_locked();
    generation_.fetch_add(1, std::memory_order_relaxed);
    take_remote_aborts_locked();  // of peers that were here first, and found another death
  }
  is_recovery_unfinished_.store(false, std::memory_order_relaxed);
  return std::move(recovery_result_);
}

bool Group::has_running_operations() {
  if (num_running_.load() != 0)
    return true;
  const std::lock_guard<sync::Mutex> lock(mutex_);
  for (const auto& [number, weak] : recoverables_)
    if (const auto buffer = weak.lock(); buffer && !buffer->is_idle())
      return true;
  return false;
}

/// Operations of progress threads end by the abort; a stray one is given time, then aborted.
void Group::end_operations(const InterruptCheck& interrupt_check, const char* purpose) {
  const int64_t start_ns = sync::now_ns();
  while (has_running_operations()) {
    if (interrupt_check)
      interrupt_check();
    if (sync::now_ns() - start_ns > kAbortPatienceNs)
      abort_to(purpose);
    sync::sleep_ns(1'000'000);
  }
}

void Group::abort_to(const char* purpose) {
  if (is_aborted() || !recovery_.decision.empty())
    return;
  std::vector<int> ranks = missing_ranks();
  if (ranks.empty())
    ranks.push_back(rank_idx_);
  abort(
      layout::AbortCause::kPeerFailed,
      WaitSite{},
      ranks,
      concat("rank ", rank_idx_, " left the operations of this communicator to ", purpose, " it"));
}

/// Hears what peers said and answers; @return whether every living rank has committed.
bool Group::step_recovery() {
  const auto is_gone = missing_ranks();
  // Who goes on without this rank says so before it leaves. But once this rank has committed, a
  // peer may have ended this call and be in the next, while others' commitments are on their way.
  if (recovery_.decision.empty())
    shrink_agreement_->check_nobody_shrinks("recover");
  else
    shrink_agreement_->check_evicted();
  const std::string& own = recovery_.proposals[static_cast<size_t>(rank_idx_)];
  std::string message;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    if (peer_rank == rank_idx_ || !is_active(peer_rank))
      continue;
    const bool is_heeded = own.empty() || own[1 + idx] == 0;
    while (link_->take(members_[idx], channel_ | kRecoveryChannelBit, generation(), &message)) {
      if (message[0] == kProposal) {
        recovery_.proposals[idx] = message;
        continue;
      }
      recovery_.has_committed[idx] = 1;
      if (recovery_.decision.empty() && is_heeded)
        recovery_result_ = commit(message);
    }
  }
  if (recovery_.decision.empty()) {
    propose();
    if (!is_agreed())
      return false;
    recovery_result_ = commit(merge_proposals());
  }
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    const bool is_done = peer_rank == rank_idx_ || !is_active(peer_rank) ||
                         recovery_.has_committed[static_cast<size_t>(peer_rank)] != 0 ||
                         std::find(is_gone.begin(), is_gone.end(), peer_rank) != is_gone.end();
    if (!is_done)
      return false;
  }
  return true;
}

/// Tells the peers what this rank knows, if it knows more than it said last.
void Group::propose() {
  std::string failed(static_cast<size_t>(num_ranks()), '\0');
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    if (peer_rank != rank_idx_ && (!is_active(peer_rank) || state(peer_rank) != PeerState::kAlive))
      failed[static_cast<size_t>(peer_rank)] = 1;
  for (const auto& proposal : recovery_.proposals)
    for (size_t i = 0; !proposal.empty() && i < failed.size(); ++i)
      failed[i] = static_cast<char>(failed[i] | proposal[1 + i]);
  MOE_CHECK(failed[static_cast<size_t>(rank_idx_)] == 0,
            "recover: a peer takes rank ",
            rank_idx_,
            ", which is this one, for failed");
  std::string& own = recovery_.proposals[static_cast<size_t>(rank_idx_)];
  if (!own.empty() && own.compare(1, failed.size(), failed) == 0)
    return;
  own = kProposal + failed;
  append_value(&own, gather_sequence_);
  own += own_epochs();
  post_to_peers(channel_ | kRecoveryChannelBit, generation(), own);
}

/// One BufferEpochs per buffer of this rank.
std::string Group::own_epochs() {
  std::string bytes;
  const std::lock_guard<sync::Mutex> lock(mutex_);
  for (const auto& [buffer_number, weak] : recoverables_)
    if (const auto buffer = weak.lock()) {
      const Recoverable::Epochs epochs = buffer->epochs();
      append_value(&bytes, BufferEpochs{buffer_number, epochs.next, epochs.last_completed});
    }
  return bytes;
}

bool Group::is_agreed() const {
  const auto count = static_cast<size_t>(num_ranks());
  const std::string& own = recovery_.proposals[static_cast<size_t>(rank_idx_)];
  for (size_t peer_rank = 0; peer_rank < count; ++peer_rank) {
    const std::string& proposal = recovery_.proposals[peer_rank];
    if (own[1 + peer_rank] == 0 &&
        (proposal.empty() || proposal.compare(1, count, own, 1, count) != 0))
      return false;
  }
  return true;
}

/// The commitment that follows from proposals that agree.
std::string Group::merge_proposals() const {
  const auto count = static_cast<size_t>(num_ranks());
  const std::string& own = recovery_.proposals[static_cast<size_t>(rank_idx_)];
  uint64_t next_sequence = 0;
  std::map<uint64_t, BufferEpochs> buffers;
  for (size_t peer_rank = 0; peer_rank < count; ++peer_rank) {
    if (own[1 + peer_rank] != 0)
      continue;
    const std::string& proposal = recovery_.proposals[peer_rank];
    size_t position = 1 + count;
    next_sequence = std::max(next_sequence, read_value<uint64_t>(proposal, &position));
    while (position < proposal.size()) {
      const auto epochs = read_value<BufferEpochs>(proposal, &position);
      BufferEpochs& merged = buffers.emplace(epochs.buffer_number, epochs).first->second;
      merged.next_epoch = std::max(merged.next_epoch, epochs.next_epoch);
      merged.last_completed = std::min(merged.last_completed, epochs.last_completed);
    }
  }
  std::string decision = kCommitment + own.substr(1, count);
  append_value(&decision, next_sequence);
  for (const auto& [number, epochs] : buffers)
    append_value(&decision, epochs);
  return decision;
}

/// Does what was decided, then tells the peers; from then on they may write to this rank.
RecoveryResult Group::commit(const std::string& decision) {
  RecoveryResult result;
  for (int rank = 0; rank < num_ranks(); ++rank)
    if (decision[1 + static_cast<size_t>(rank)] != 0) {
      is_active_[static_cast<size_t>(rank)] = 0;
      result.failed_ranks.push_back(rank);
    }
  std::vector<std::shared_ptr<void>> kept;  // let go of without the lock: it may run Python
  size_t position = 1 + static_cast<size_t>(num_ranks());
  gather_sequence_ = read_value<uint64_t>(decision, &position);
  {
    const std::lock_guard<sync::Mutex> lock(mutex_);
    while (position < decision.size()) {
      const auto epochs = read_value<BufferEpochs>(decision, &position);
      result.completed_epochs.push_back(
          epochs.last_completed == 0 ? -1 : static_cast<int64_t>(epochs.last_completed));
      const auto entry = recoverables_.find(epochs.buffer_number);
      if (const auto buffer = entry == recoverables_.end() ? nullptr : entry->second.lock())
        buffer->restart(epochs.next_epoch);
    }
    quarantined_.clear();
    kept.swap(kept_);
  }
  recovery_.decision = decision;
  post_to_peers(channel_ | kRecoveryChannelBit, generation(), decision);
  return result;
}

int Group::first_missing_in_recovery() const {
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    if (peer_rank == rank_idx_ || !is_active(peer_rank) || state(peer_rank) != PeerState::kAlive)
      continue;
    if (recovery_.decision.empty() ? recovery_.proposals[idx].empty()
                                   : recovery_.has_committed[idx] == 0)
      return peer_rank;
  }
  return -1;
}

}  // namespace moe::host
