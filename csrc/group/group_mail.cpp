#include <algorithm>
#include <cstring>
#include <utility>

#include "group/group.h"
#include "group/message.h"
#include "group/peer_wait.h"

// What the link's service thread does for this rank: it stores what ranks of
// other nodes say and ranks of this node store themselves (aborts, and ends of
// buffers) as soon as it arrives, so that no wait has to look at the link; and
// it answers peers that look for who holds them up.

namespace moe::host {

namespace {

// The service thread of a rank that runs answers at once, where it gets a core.
constexpr int64_t kLeastAnswerNs = 1'000'000'000;

}  // namespace

/// Stores here what ranks of other nodes have sent.
void Group::take_mail() {
  if (nodes_.num_nodes() == 1)
    return;
  const std::lock_guard<sync::Mutex> lock(mail_mutex_);
  take_remote_ends_locked();
  take_remote_aborts_locked();
}

void Group::take_remote_ends_locked() {
  std::string message;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    while (!is_local(peer_rank) &&
           link_->take(members_[idx], channel_ | kEndChannelBit, 0, &message)) {
      // What made that rank destroy it comes first, also for whoever looks.
      take_remote_aborts_locked();
      size_t position = 0;
      const auto buffer_number = read_value<uint64_t>(message, &position);
      const auto next_epoch = read_value<uint64_t>(message, &position);
      // Before this rank has destroyed a buffer it watches it: no peer has one
      // that this has not.
      const auto found = closed_words_.find(buffer_number);
      if (found != closed_words_.end())
        sync::store_release(*found->second[idx], next_epoch);
    }
  }
}

void Group::watch_ends(uint64_t buffer_number, std::vector<uint64_t*> closed_words) {
  const std::lock_guard<sync::Mutex> lock(mail_mutex_);
  closed_words_[buffer_number] = std::move(closed_words);
}

void Group::answer_for(uint64_t buffer_number, std::function<int()> awaited_rank) {
  const std::lock_guard<sync::Mutex> lock(mail_mutex_);
  awaited_ranks_[buffer_number] = std::move(awaited_rank);
}

void Group::forget_buffer(uint64_t buffer_number) {
  const std::lock_guard<sync::Mutex> lock(mail_mutex_);
  closed_words_.erase(buffer_number);
  awaited_ranks_.erase(buffer_number);
  entries_->forget(buffer_number);
}

// A question: sequence 0; uint64 its number, from 1 on; uint64 buffer number.
// The answer: sequence of that number; int32 rank.

void Group::answer_questions() {
  std::string message;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    const int link_rank = members_[static_cast<size_t>(peer_rank)];
    while (peer_rank != rank_idx_ &&
           link_->take(link_rank, channel_ | kAwaitedChannelBit, 0, &message)) {
      size_t position = 0;
      const auto number = read_value<uint64_t>(message, &position);
      const auto buffer_number = read_value<uint64_t>(message, &position);
      int32_t awaited_rank = -1;
      {
        const std::lock_guard<sync::Mutex> lock(mail_mutex_);
        const auto found = awaited_ranks_.find(buffer_number);
        if (found != awaited_ranks_.end())
          awaited_rank = found->second();
      }
      std::string answer;
      append_value(&answer, awaited_rank);
      link_->post(link_rank, channel_ | kAwaitedChannelBit, number, answer);
    }
  }
}

void Group::answer_probes() {
  std::string message;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    while (peer_rank != rank_idx_ &&
           link_->take(members_[static_cast<size_t>(peer_rank)], probe_channel(), 0, &message))
      answer_probe(*entries_, message);
}

std::optional<int> Group::ask_awaited(int rank_idx, const WaitSite& site) {
  const int link_rank = members_[static_cast<size_t>(rank_idx)];
  const uint64_t number = num_questions_.fetch_add(1) + 1;
  std::string question;
  append_value(&question, number);
  append_value(&question, site.buffer_number);
  link_->post(link_rank, channel_ | kAwaitedChannelBit, 0, question);
  const int64_t end_ns = sync::now_ns() + std::max(kLeastAnswerNs, stall_timeout_ns_ / 10);
  std::optional<int> awaited_rank;
  await_peer(
      *this,
      site,
      [&] {
        std::string answer;
        size_t position = 0;
        if (!awaited_rank && link_->take(link_rank, channel_ | kAwaitedChannelBit, number, &answer))
          awaited_rank = read_value<int32_t>(answer, &position);
        return awaited_rank.has_value() || state(rank_idx) != PeerState::kAlive ||
               sync::now_ns() >= end_ns;
      },
      [](int64_t) {});  // its end is a limit of its own, and no answer is one
  return awaited_rank;
}

void Group::post_end(uint64_t buffer_number, uint64_t next_epoch) {
  if (is_leaving() || is_destroyed())
    return;  // peers hear that this rank has left
  std::string message;
  append_value(&message, buffer_number);
  append_value(&message, next_epoch);
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    if (!is_local(peer_rank) && is_active(peer_rank))
      link_->post(members_[static_cast<size_t>(peer_rank)], channel_ | kEndChannelBit, 0, message);
}

void Group::take_remote_aborts_locked() {
  std::string message;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    const int link_rank = members_[static_cast<size_t>(peer_rank)];
    while (!is_local(peer_rank) &&
           link_->take(link_rank, channel_ | kAbortChannelBit, generation(), &message)) {
      layout::AbortRecord record{};
      if (message.size() != sizeof(record))
        continue;
      std::memcpy(&record, message.data(), sizeof(record));
      record.message[layout::AbortRecord::kMessageBytes - 1] = '\0';
      record.num_ranks = std::clamp(record.num_ranks, 0, layout::AbortRecord::kMaxRanks);
      store_abort(*own_, record);
    }
  }
}

}  // namespace moe::host
