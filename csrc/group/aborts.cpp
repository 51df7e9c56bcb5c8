#include "group/aborts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/text.h"

namespace moe::group {

void Aborts::abort(layout::AbortCause cause,
                   const WaitSite& site,
                   const std::vector<int>& ranks,
                   const std::string& message) {
  layout::AbortRecord record{};
  record.cause = static_cast<int32_t>(cause);
  record.operation = static_cast<int32_t>(site.operation);
  record.phase = static_cast<int32_t>(site.phase);
  record.epoch = site.operation == layout::Operation::kNone ? -1 : site.epoch;
  record.num_ranks =
      static_cast<int32_t>(std::min<size_t>(ranks.size(), layout::AbortRecord::kMaxRanks));
  std::copy_n(ranks.begin(), record.num_ranks, record.ranks);
  store_text(record.message, message);
  store(ranks_.own_control(), record);
  store_at_peers(record);
}

void Aborts::store_at_peers(const layout::AbortRecord& record) {
  // To other nodes once: who has sent one abort of a generation has nothing new to say.
  const bool has_posted = posted_.exchange(generation() + 1) == generation() + 1;
  const std::string message(reinterpret_cast<const char*>(&record), sizeof(record));
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank) {
    if (!ranks_.is_peer(peer_rank) || ranks_.state(peer_rank) != PeerState::kAlive)
      continue;
    if (ranks_.is_local(peer_rank))
      store(ranks_.control(peer_rank), record);
    else if (!has_posted)
      ranks_.post(peer_rank, Topic::kAbort, generation(), message);
  }
  // Stores of this rank from now on are seen by nobody who does not see the abort as well.
  sync::fence_seq_cst();
}

void Aborts::spread() {
  if (!has_aborted() || !await_record())
    return;
  layout::AbortRecord record{};
  sync::read_body<sizeof(record.state)>(record, *own_record_);
  store_at_peers(record);
}

void Aborts::store(layout::ControlBlock& control, const layout::AbortRecord& record) {
  auto& target = control.abort;
  const uint32_t present = sync::load_acquire(target.state);
  const bool is_free = present == 0 || layout::AbortRecord::generation(present) < generation();
  if (!is_free || !sync::compare_exchange(
                      target.state,
                      present,
                      layout::AbortRecord::word(generation(), layout::AbortRecord::kBeingWritten)))
    return;
  const uint32_t is_set = layout::AbortRecord::word(generation(), layout::AbortRecord::kSet);
  sync::write_body<sizeof(record.state)>(target, record);
  sync::store_release(target.state, is_set);
  sync::ring(control.doorbell);
}

bool Aborts::await_record() const {
  // The writer may have been killed between its two stores: what it wrote is then unknown.
  const int64_t limit_ns = sync::now_ns() + 100'000'000;
  const auto is_there = [this] {
    return layout::AbortRecord::is_set(sync::load_acquire(own_record_->state));
  };
  while (!is_there()) {
    if (sync::now_ns() >= limit_ns)
      return is_there();
    sync::yield();
  }
  return true;
}

void Aborts::store_received(const std::string& message) {
  layout::AbortRecord record{};
  if (message.size() != sizeof(record))
    return;
  std::memcpy(&record, message.data(), sizeof(record));
  record.message[layout::AbortRecord::kMessageBytes - 1] = '\0';
  record.num_ranks = std::clamp(record.num_ranks, 0, layout::AbortRecord::kMaxRanks);
  store(ranks_.own_control(), record);
}

void Aborts::throw_cause() const {
  if (!await_record()) {
    throw PeerFailed("a rank died while it aborted the communicator",
                     FailureSite{ranks_.missing_ranks(), "", "idle", -1});
  }
  layout::AbortRecord record;
  sync::read_body<sizeof(record.state)>(record, *own_record_);
  FailureSite site{std::vector<int>(record.ranks, record.ranks + record.num_ranks),
                   record.operation == 0
                       ? ""
                       : layout::operation_name(static_cast<layout::Operation>(record.operation)),
                   layout::phase_name(static_cast<layout::Phase>(record.phase)),
                   record.epoch};
  if (record.cause == static_cast<int32_t>(layout::AbortCause::kPeerTimeout))
    throw PeerTimeout(record.message, std::move(site));
  if (record.cause == static_cast<int32_t>(layout::AbortCause::kEvicted) && !site.ranks.empty()) {
    const std::vector<int> declarer{site.ranks.front()};
    site.ranks.erase(site.ranks.begin());
    if (std::find(site.ranks.begin(), site.ranks.end(), ranks_.rank_idx()) != site.ranks.end())
      throw Evicted(concat(record.message, "; rank ", ranks_.rank_idx(), " is this one"),
                    FailureSite{declarer, "shrink", "idle", -1});
  }
  throw PeerFailed(record.message, std::move(site));
}

}  // namespace moe::group
