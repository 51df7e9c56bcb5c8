#include "group/mail.h"

#include <mutex>
#include <utility>

#include "group/message.h"

namespace moe::group {

void Mail::take_all() {
  if (ranks_.nodes().num_nodes() > 1) {
    const std::lock_guard<sync::Mutex> lock(mutex_);
    take_ends_locked();
    take_aborts_locked();
  }
  answer_questions();
}

void Mail::begin_generation() {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  // The living have committed, hence have sent every abort that this recovery ends.
  take_aborts_locked();
  aborts_.begin_generation();
  take_aborts_locked();  // of peers that were here first, and found another death
}

void Mail::take_ends_locked() {
  std::string message;
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank)
    while (!ranks_.is_local(peer_rank) && ranks_.take(peer_rank, Topic::kEnd, 0, &message)) {
      // The cause for which that rank destroyed it comes first, also for a reader of the mail.
      take_aborts_locked();
      size_t position = 0;
      const auto buffer_number = read_value<uint64_t>(message, &position);
      const auto next_epoch = read_value<uint64_t>(message, &position);
      // Before this rank has destroyed a buffer it watches it: no peer has one that this has not.
      const auto found = closed_words_.find(buffer_number);
      if (found != closed_words_.end())
        sync::store_release(*found->second[static_cast<size_t>(peer_rank)], next_epoch);
    }
}

void Mail::take_aborts_locked() {
  std::string message;
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank)
    while (!ranks_.is_local(peer_rank) &&
           ranks_.take(peer_rank, Topic::kAbort, aborts_.generation(), &message))
      aborts_.store_received(message);
}

void Mail::post_end(uint64_t buffer_number, uint64_t next_epoch) const {
  if (ranks_.is_leaving() || ranks_.is_destroyed())
    return;  // peers hear that this rank has left
  std::string message;
  append_value(&message, buffer_number);
  append_value(&message, next_epoch);
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank)
    if (!ranks_.is_local(peer_rank) && ranks_.is_active(peer_rank))
      ranks_.post(peer_rank, Topic::kEnd, 0, message);
}

void Mail::watch_ends(uint64_t buffer_number, std::vector<uint64_t*> closed_words) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  closed_words_[buffer_number] = std::move(closed_words);
}

void Mail::answer_for(uint64_t buffer_number, std::function<int()> awaited_rank) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  awaited_ranks_[buffer_number] = std::move(awaited_rank);
}

void Mail::forget_buffer(uint64_t buffer_number) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  closed_words_.erase(buffer_number);
  awaited_ranks_.erase(buffer_number);
  entries_->forget(buffer_number);
}

// A question: sequence 0; uint64 its number, from 1 on; uint64 buffer number.
// The answer: sequence of that number; int32 rank.

uint64_t Mail::ask_awaited(int rank_idx, uint64_t buffer_number) {
  const uint64_t number = num_questions_.fetch_add(1) + 1;
  std::string question;
  append_value(&question, number);
  append_value(&question, buffer_number);
  ranks_.post(rank_idx, Topic::kAwaited, 0, question);
  return number;
}

std::optional<int> Mail::take_answer(int rank_idx, uint64_t question_number) const {
  std::string answer;
  size_t position = 0;
  if (!ranks_.take(rank_idx, Topic::kAwaited, question_number, &answer))
    return std::nullopt;
  return read_value<int32_t>(answer, &position);
}

void Mail::answer_questions() {
  std::string message;
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank)
    while (peer_rank != ranks_.rank_idx() && ranks_.take(peer_rank, Topic::kAwaited, 0, &message)) {
      size_t position = 0;
      const auto number = read_value<uint64_t>(message, &position);
      const auto buffer_number = read_value<uint64_t>(message, &position);
      int32_t awaited_rank = -1;
      {
        const std::lock_guard<sync::Mutex> lock(mutex_);
        const auto found = awaited_ranks_.find(buffer_number);
        if (found != awaited_ranks_.end())
          awaited_rank = found->second();
      }
      std::string answer;
      append_value(&answer, awaited_rank);
      ranks_.post(peer_rank, Topic::kAwaited, number, answer);
    }
}

}  // namespace moe::group
