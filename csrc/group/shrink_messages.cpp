#include <algorithm>
#include <utility>

#include "group/message.h"
#include "group/shrink_ballots.h"

// Messages between ranks while survivors of failures agree, and how they are heard.

namespace moe::group {

namespace {

constexpr char kBallot = 'b';
constexpr char kDone = 'd';
constexpr char kResignation = 'v';
constexpr char kRefusal = 'e';

}  // namespace

// A message: [0] kind. Of a ballot then: uint32 round; uint32 has_group; uint32 needs_majority;
// num_ranks bytes of members; uint64 bytes of `agreed`, and they; one BufferEpochs per buffer. Of
// kDone: uint32 round. Of a refusal: kMistake, text; or kFailure, num_ranks bytes of members (those
// that have failed are named by the error), text.

void ShrinkBallots::become_done_locked() {
  is_done_ = true;
  std::string message(1, kDone);
  append_value(&message, built_round_);
  post(message);
}

void ShrinkBallots::say_locked() {
  Statement& own = statements_[ranks_.own_idx()];
  own.has_spoken = true;
  if (own.ballot.has_group != 0)
    built_round_ = own.ballot.round;
  std::string message(1, kBallot);
  append_value(&message, own.ballot.round);
  append_value(&message, own.ballot.has_group);
  append_value(&message, own.needs_majority);
  message += own.ballot.members;
  append_value(&message, static_cast<uint64_t>(own.agreed.size()));
  message += own.agreed;
  message += own.epochs;
  post(message);
}

void ShrinkBallots::hear_locked() {
  std::string message;
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank) {
    if (!ranks_.is_peer(peer_rank))
      continue;
    const auto idx = static_cast<size_t>(peer_rank);
    // The attempt ends where a message says so: what follows belongs to another.
    while (ranks_.take(peer_rank, Topic::kShrink, attempt_, &message)) {
      const bool is_heeded = !is_failed_locked(peer_rank);
      size_t position = 1;
      switch (message.empty() ? '\0' : message[0]) {
        case kBallot:
          hear_ballot_locked(peer_rank, message, is_heeded);
          break;
        case kResignation:
          statements_[idx].has_resigned = true;
          break;
        case kDone:
          if (is_heeded && !is_done_ && built_round_ == read_value<uint32_t>(message, &position))
            become_done_locked();
          break;
        case kRefusal:
          if (is_heeded && !is_done_)
            end_attempt_locked(message.substr(1));
          break;
        default:
          break;
      }
    }
  }
}

void ShrinkBallots::hear_ballot_locked(int peer_rank, const std::string& message, bool is_heeded) {
  const auto num_ranks = static_cast<size_t>(ranks_.num_ranks());
  size_t position = 1;
  Statement heard;
  heard.has_spoken = true;
  heard.ballot.round = read_value<uint32_t>(message, &position);
  heard.ballot.has_group = read_value<uint32_t>(message, &position);
  heard.needs_majority = read_value<uint32_t>(message, &position);
  heard.ballot.members = message.substr(position, num_ranks);
  position += num_ranks;
  const auto agreed_bytes = read_value<uint64_t>(message, &position);
  heard.agreed = message.substr(position, agreed_bytes);
  heard.epochs = message.substr(position + agreed_bytes);
  Statement& statement = statements_[static_cast<size_t>(peer_rank)];
  if ((heard.ballot.members[ranks_.own_idx()] & kFailed) != 0 && counts(heard)) {
    named_by_ = peer_rank;
    position = 0;
    const uint64_t last_completed =
        heard.epochs.empty() ? 0 : read_value<BufferEpochs>(heard.epochs, &position).last_completed;
    named_after_ = last_completed == 0 ? -1 : static_cast<int64_t>(last_completed);
    if (is_heeded)
      resign_locked();
  }
  heard.has_resigned = statement.has_resigned;
  statement = std::move(heard);
}

/// This rank is no part of what comes: nobody needs to wait for a word of it.
void ShrinkBallots::resign_locked() {
  if (is_evicted_)
    return;
  is_evicted_ = true;
  post(std::string(1, kResignation));
}

void ShrinkBallots::end_attempt_locked(const std::string& text) {
  post(kRefusal + text);
  ++attempt_;
  std::fill(reported_.begin(), reported_.end(), '\0');
  for (Statement& statement : statements_) {
    const bool has_resigned = statement.has_resigned;
    statement = Statement{};
    statement.has_resigned = has_resigned;
    statement.ballot.members = reported_;
  }
  built_round_ = kNoRound;
  is_decided_ = false;
  refusal_ = ended_by_ = text;
  if (text[0] == kFailure && named_by_ >= 0)  // by ranks that this one takes for failed
    resign_locked();
  is_unfinished_.store(false, std::memory_order_relaxed);
}

void ShrinkBallots::post(const std::string& message) {
  ranks_.post_to_peers(Topic::kShrink, attempt_, message);
}

}  // namespace moe::group
