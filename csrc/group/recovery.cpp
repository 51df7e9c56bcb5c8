#include "group/recovery.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "group/message.h"
#include "group/peer_wait.h"
#include "group/retired_memory.h"

namespace moe::group {

namespace {

constexpr char kProposal = 'p';
constexpr char kCommitment = 'c';

}  // namespace

// A message of the recovery: [0] kind; [1, 1 + num_ranks) 1 for each failed rank; uint64 next
// sequence of all_gather(); then one BufferEpochs per buffer.

RecoveryResult Recovery::recover(const InterruptCheck& interrupt_check) {
  peers_.check_process("recover");
  const auto count = static_cast<size_t>(peers_.num_ranks());
  proposals_.resize(count);
  has_committed_.resize(count);
  is_unfinished_.store(true, std::memory_order_relaxed);
  end_operations(interrupt_check, "recover");
  constexpr const char* kDeed = "call recover()";
  const WaitSite site{.interrupt_check = &interrupt_check, .call = "recover"};
  ArrivalClock arrival(peers_.arrival_timeout_ns());
  GraceClock since_decision;
  // Not await_peer(): what aborted the communicator is what this call is for.
  wait_until(
      peers_,
      [this] { return step(); },
      [&] {
        answer_caller(peers_, site);
        const int64_t now_ns = sync::now_ns();
        // A rank may have given this call up before all had committed.
        if (!decision_.empty() && since_decision.has_passed(now_ns, kAbortPatienceNs))
          peers_.shrink_ballots().check_nobody_shrinks("recover");
        if (now_ns - arrival.start_ns() > kAbortPatienceNs)
          abort_to("recover");
        const int missing = first_missing();
        // Nobody waits for this rank in an operation: the limit ends this call, which may be made
        // again, and aborts nothing.
        if (missing >= 0 && arrival.has_run_out(peers_, now_ns, missing, [] { return kDeed; }))
          throw PeerTimeout(describe_absence(peers_, missing, kDeed, peers_.arrival_timeout_ns()),
                            FailureSite{{missing}, "recover", "idle", -1});
      });
  proposals_.clear();
  has_committed_.clear();
  decision_.clear();
  peers_.mail().begin_generation();
  is_unfinished_.store(false, std::memory_order_relaxed);
  return std::move(result_);
}

bool Recovery::has_running_operations() {
  if (num_running_.load() != 0)
    return true;
  const std::lock_guard<sync::Mutex> lock(mutex_);
  for (const auto& [number, weak] : buffers_)
    if (const auto buffer = weak.lock(); buffer && !buffer->is_idle())
      return true;
  return false;
}

void Recovery::end_operations(const InterruptCheck& interrupt_check, const char* purpose) {
  const int64_t start_ns = sync::now_ns();
  while (has_running_operations()) {
    if (interrupt_check)
      interrupt_check();
    if (sync::now_ns() - start_ns > kAbortPatienceNs)
      abort_to(purpose);
    sync::sleep_ns(1'000'000);
  }
}

void Recovery::abort_to(const char* purpose) {
  if (peers_.is_aborted() || !decision_.empty())
    return;
  std::vector<int> ranks = peers_.missing_ranks();
  if (ranks.empty())
    ranks.push_back(peers_.rank_idx());
  peers_.abort(layout::AbortCause::kPeerFailed,
               WaitSite{},
               ranks,
               concat("rank ",
                      peers_.rank_idx(),
                      " left the operations of this communicator to ",
                      purpose,
                      " it"));
}

/// Hears what peers said and answers; @return whether every living rank has committed.
bool Recovery::step() {
  const auto is_gone = peers_.missing_ranks();
  // Peers that go on without this rank say so before they leave. But once this rank has committed,
  // a peer may have ended this call and be in the next, while others' commitments are on their way.
  if (decision_.empty())
    peers_.shrink_ballots().check_nobody_shrinks("recover");
  else
    peers_.shrink_ballots().check_evicted();
  const std::string& own = proposals_[peers_.own_idx()];
  std::string message;
  for (int peer_rank = 0; peer_rank < peers_.num_ranks(); ++peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    if (!peers_.is_peer(peer_rank))
      continue;
    const bool is_heeded = own.empty() || own[1 + idx] == 0;
    while (peers_.take(peer_rank, Topic::kRecovery, peers_.generation(), &message)) {
      if (message[0] == kProposal) {
        proposals_[idx] = message;
        continue;
      }
      has_committed_[idx] = 1;
      if (decision_.empty() && is_heeded)
        result_ = commit(message);
    }
  }
  if (decision_.empty()) {
    propose();
    if (!is_agreed())
      return false;
    result_ = commit(merge_proposals());
  }
  for (int peer_rank = 0; peer_rank < peers_.num_ranks(); ++peer_rank) {
    const bool is_done = !peers_.is_peer(peer_rank) ||
                         has_committed_[static_cast<size_t>(peer_rank)] != 0 ||
                         std::find(is_gone.begin(), is_gone.end(), peer_rank) != is_gone.end();
    if (!is_done)
      return false;
  }
  return true;
}

/// Tells the peers what this rank knows, if it knows more than it said last.
void Recovery::propose() {
  std::string failed(static_cast<size_t>(peers_.num_ranks()), '\0');
  for (int peer_rank = 0; peer_rank < peers_.num_ranks(); ++peer_rank)
    if (peer_rank != peers_.rank_idx() &&
        (!peers_.is_active(peer_rank) || peers_.state(peer_rank) != PeerState::kAlive))
      failed[static_cast<size_t>(peer_rank)] = 1;
  for (const auto& proposal : proposals_)
    for (size_t i = 0; !proposal.empty() && i < failed.size(); ++i)
      failed[i] = static_cast<char>(failed[i] | proposal[1 + i]);
  MOE_CHECK(failed[peers_.own_idx()] == 0,
            "recover: a peer takes rank ",
            peers_.rank_idx(),
            ", which is this one, for failed");
  std::string& own = proposals_[peers_.own_idx()];
  if (!own.empty() && own.compare(1, failed.size(), failed) == 0)
    return;
  own = kProposal + failed;
  append_value(&own, peers_.next_gather_sequence());
  own += own_epochs();
  peers_.post_to_peers(Topic::kRecovery, peers_.generation(), own);
}

std::string Recovery::own_epochs() {
  std::string bytes;
  const std::lock_guard<sync::Mutex> lock(mutex_);
  for (const auto& [buffer_number, weak] : buffers_)
    if (const auto buffer = weak.lock()) {
      const Recoverable::Epochs epochs = buffer->epochs();
      append_value(&bytes, BufferEpochs{buffer_number, epochs.next, epochs.last_completed});
    }
  return bytes;
}

bool Recovery::is_agreed() const {
  const auto count = static_cast<size_t>(peers_.num_ranks());
  const std::string& own = proposals_[peers_.own_idx()];
  for (size_t peer_rank = 0; peer_rank < count; ++peer_rank) {
    const std::string& proposal = proposals_[peer_rank];
    if (own[1 + peer_rank] == 0 &&
        (proposal.empty() || proposal.compare(1, count, own, 1, count) != 0))
      return false;
  }
  return true;
}

/// The commitment that follows from proposals that agree.
std::string Recovery::merge_proposals() const {
  const auto count = static_cast<size_t>(peers_.num_ranks());
  const std::string& own = proposals_[peers_.own_idx()];
  uint64_t next_sequence = 0;
  std::map<uint64_t, BufferEpochs> buffers;
  for (size_t peer_rank = 0; peer_rank < count; ++peer_rank) {
    if (own[1 + peer_rank] != 0)
      continue;
    const std::string& proposal = proposals_[peer_rank];
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
RecoveryResult Recovery::commit(const std::string& decision) {
  RecoveryResult result;
  for (int rank = 0; rank < peers_.num_ranks(); ++rank)
    if (decision[1 + static_cast<size_t>(rank)] != 0) {
      peers_.exclude(rank);
      result.failed_ranks.push_back(rank);
    }
  std::vector<std::shared_ptr<void>> kept;  // let go of without the lock: it may run Python
  size_t position = 1 + static_cast<size_t>(peers_.num_ranks());
  peers_.set_next_gather_sequence(read_value<uint64_t>(decision, &position));
  {
    const std::lock_guard<sync::Mutex> lock(mutex_);
    while (position < decision.size()) {
      const auto epochs = read_value<BufferEpochs>(decision, &position);
      result.completed_epochs.push_back(
          epochs.last_completed == 0 ? -1 : static_cast<int64_t>(epochs.last_completed));
      const auto entry = buffers_.find(epochs.buffer_number);
      if (const auto buffer = entry == buffers_.end() ? nullptr : entry->second.lock())
        buffer->restart(epochs.next_epoch);
    }
  }
  kept = retired_.release();
  decision_ = decision;
  peers_.post_to_peers(Topic::kRecovery, peers_.generation(), decision);
  return result;
}

int Recovery::first_missing() const {
  for (int peer_rank = 0; peer_rank < peers_.num_ranks(); ++peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    if (!peers_.is_peer(peer_rank) || peers_.state(peer_rank) != PeerState::kAlive)
      continue;
    if (decision_.empty() ? proposals_[idx].empty() : has_committed_[idx] == 0)
      return peer_rank;
  }
  return -1;
}

void Recovery::add(uint64_t buffer_number, std::weak_ptr<Recoverable> buffer) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  std::erase_if(buffers_, [](const auto& entry) { return entry.second.expired(); });
  buffers_.emplace(buffer_number, std::move(buffer));
}

}  // namespace moe::group
