#include "host/group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "host/wait.h"
#include "host/warn.h"

namespace moe::host {

namespace {

constexpr uint64_t kRecoveryChannelBit = uint64_t{1} << 63;
constexpr int64_t kWarnEveryNs = 60'000'000'000;

int num_usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0)
    return 1;
  return std::max(1, CPU_COUNT(&cores));
}

int64_t seconds_to_ns(double seconds) {
  // A century stands for "no limit" and keeps sums of two times inside 64 bits.
  return static_cast<int64_t>(std::min(seconds, 3.0e9) * 1e9);
}

std::string describe(const WaitSite& site) {
  if (site.operation == layout::Operation::kNone)
    return "outside an operation";
  return concat(layout::operation_name(site.operation),
                ", epoch ",
                site.epoch,
                ", phase ",
                layout::phase_name(site.phase));
}

/// What a rank says of one buffer while it recovers.
struct BufferEpochs {
  uint64_t buffer_number;
  uint64_t next_epoch;
  uint64_t num_completed;
};

template <typename Value>
void append_value(std::string* bytes, const Value& value) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename Value>
Value read_value(const std::string& bytes, size_t* position) {
  Value value{};
  if (*position + sizeof(value) > bytes.size())
    throw std::runtime_error("a control message is shorter than its contents");
  std::memcpy(&value, bytes.data() + *position, sizeof(value));
  *position += sizeof(value);
  return value;
}

}  // namespace

Group::Group(std::shared_ptr<PeerLink> link,
             std::shared_ptr<SymmetricMemory> memory,
             std::vector<int> members,
             int rank_idx,
             uint64_t channel,
             double stall_timeout_s,
             double arrival_timeout_s,
             int num_threads,
             const InterruptCheck& interrupt_check)
    : link_(std::move(link)),
      memory_(std::move(memory)),
      members_(std::move(members)),
      rank_idx_(rank_idx),
      channel_(channel & ~kRecoveryChannelBit),
      stall_timeout_ns_(seconds_to_ns(stall_timeout_s)),
      arrival_timeout_ns_(seconds_to_ns(arrival_timeout_s)),
      num_threads_(num_threads),
      has_spare_cores_(static_cast<int>(members_.size()) <= num_usable_cores()),
      process_id_(getpid()),
      controls_(members_.size()),
      is_active_(members_.size(), 1) {
  MOE_CHECK(rank_idx >= 0 && rank_idx < num_ranks(),
            "rank ",
            rank_idx,
            " is not a rank of a group of ",
            num_ranks());
  own_control_ = memory_->allocate(sizeof(layout::ControlBlock));
  std::memset(own_control_->data(), 0, sizeof(layout::ControlBlock));
  auto* own = reinterpret_cast<layout::ControlBlock*>(own_control_->data());
  own_abort_ = &own->abort;
  // Until peers' blocks are known every wait is for a message, which rings the own doorbell.
  std::fill(controls_.begin(), controls_.end(), own);
  listener_id_ = link_->add_listener([own] { sync::ring(own->doorbell); });
  try {
    std::string payload;
    append_value(&payload, own_control_->offer());
    const auto payloads = all_gather(payload, interrupt_check);
    WaitSite site;
    site.interrupt_check = &interrupt_check;
    for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
      size_t position = 0;
      const auto offer = read_value<Offer>(payloads[static_cast<size_t>(peer_rank)], &position);
      controls_[static_cast<size_t>(peer_rank)] =
          reinterpret_cast<layout::ControlBlock*>(resolve(peer_rank, offer, site));
    }
    // Nobody may write to a peer's block before that peer zeroed it: the gather above ordered that.
  } catch (...) {
    link_->remove_listener(listener_id_);
    own_control_->quarantine();
    throw;
  }
}

Group::~Group() {
  destroy();
  // Peers may still store an abort record or ring: the bytes must never serve anything else.
  if (own_control_)
    own_control_->quarantine();
  for (auto& window : quarantined_)
    window->quarantine();
  for (auto& [window, is_unused] : retired_)
    if (!is_unused())
      window->quarantine();
}

void Group::destroy() {
  if (is_destroyed_.exchange(true))
    return;
  link_->remove_listener(listener_id_);
}

std::byte* Group::resolve(int rank_idx, const Offer& offer, const WaitSite& site) {
  const int link_rank = members_[static_cast<size_t>(rank_idx)];
  std::byte* address = memory_->try_resolve(link_rank, offer);
  if (address != nullptr) [[likely]]
    return address;
  const int64_t start_ns = sync::now_ns();
  wait_until(
      *this,
      [&] { return (address = memory_->try_resolve(link_rank, offer)) != nullptr; },
      [&] {
        check_abort();
        if (site.interrupt_check != nullptr && *site.interrupt_check)
          (*site.interrupt_check)();
        check_peer(rank_idx, site);
        if (sync::now_ns() - start_ns > stall_timeout_ns_) {
          abort(
              layout::AbortCause::kPeerTimeout,
              site,
              {rank_idx},
              concat(
                  "rank ", rank_idx, " offered memory it did not announce (", describe(site), ")"));
          throw_abort();
        }
      });
  return address;
}

void Group::check_usable(layout::Operation operation) const {
  MOE_CHECK(
      !is_destroyed(), layout::operation_name(operation), ": the communicator has been destroyed");
  MOE_CHECK(getpid() == process_id_,
            layout::operation_name(operation),
            ": the communicator belongs to process ",
            process_id_,
            " and this is its forked child ",
            getpid());
  check_abort();
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (!is_active(peer_rank) || peer_rank == rank_idx_)
      continue;
    const PeerState peer_state = state(peer_rank);
    if (peer_state != PeerState::kAlive) [[unlikely]]
      throw PeerFailed(concat("rank ",
                              peer_rank,
                              peer_state == PeerState::kDead ? " died" : " left the communicator",
                              " before this ",
                              layout::operation_name(operation)),
                       FailureSite{{peer_rank}, layout::operation_name(operation), "idle", -1});
  }
}

void Group::check_peer(int peer_rank, const WaitSite& site) {
  const PeerState peer_state = state(peer_rank);
  if (peer_state == PeerState::kAlive || peer_rank == rank_idx_)
    return;
  abort(layout::AbortCause::kPeerFailed,
        site,
        {peer_rank},
        concat("rank ",
               peer_rank,
               peer_state == PeerState::kDead ? " died" : " left",
               " while rank ",
               rank_idx_,
               " waited for it (",
               describe(site),
               ")"));
  throw_abort();
}

void Group::abort(layout::AbortCause cause,
                  const WaitSite& site,
                  const std::vector<int>& ranks,
                  const std::string& message) {
  layout::AbortRecord record{};
  record.cause = static_cast<int32_t>(cause);
  record.operation = static_cast<int32_t>(site.operation);
  record.phase = static_cast<int32_t>(site.phase);
  record.epoch = site.epoch;
  record.num_ranks =
      static_cast<int32_t>(std::min<size_t>(ranks.size(), layout::AbortRecord::kMaxRanks));
  std::copy_n(ranks.begin(), record.num_ranks, record.ranks);
  std::strncpy(record.message, message.c_str(), sizeof(record.message) - 1);
  const auto store = [&](int rank) {
    auto& target = controls_[static_cast<size_t>(rank)]->abort;
    if (!sync::compare_exchange(target.state, uint32_t{0}, uint32_t{1}))
      return;
    std::memcpy(reinterpret_cast<char*>(&target) + sizeof(uint32_t),
                reinterpret_cast<const char*>(&record) + sizeof(uint32_t),
                sizeof(record) - sizeof(uint32_t));
    sync::store_release(target.state, uint32_t{2});
    sync::ring(doorbell(rank));
  };
  store(rank_idx_);
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    if (peer_rank != rank_idx_ && is_active(peer_rank) && state(peer_rank) == PeerState::kAlive)
      store(peer_rank);
}

void Group::throw_abort() const {
  // The writer may have been killed between its two stores: what it wrote is then unknown.
  const int64_t limit_ns = sync::now_ns() + 100'000'000;
  while (sync::load_acquire(own_abort_->state) == 1 && sync::now_ns() < limit_ns)
    sync::yield();
  if (sync::load_acquire(own_abort_->state) != 2) {
    throw PeerFailed("a rank died while it aborted the communicator",
                     FailureSite{missing_ranks(), "", "idle", -1});
  }
  const layout::AbortRecord& record = *own_abort_;
  FailureSite site{std::vector<int>(record.ranks, record.ranks + record.num_ranks),
                   record.operation == 0
                       ? ""
                       : layout::operation_name(static_cast<layout::Operation>(record.operation)),
                   layout::phase_name(static_cast<layout::Phase>(record.phase)),
                   record.epoch};
  if (record.cause == static_cast<int32_t>(layout::AbortCause::kPeerTimeout))
    throw PeerTimeout(record.message, std::move(site));
  throw PeerFailed(record.message, std::move(site));
}

std::vector<int> Group::missing_ranks() const {
  std::vector<int> ranks;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    if (peer_rank != rank_idx_ && is_active(peer_rank) && state(peer_rank) != PeerState::kAlive)
      ranks.push_back(peer_rank);
  return ranks;
}

void Group::quarantine(std::shared_ptr<Window> window) {
  if (!window)
    return;
  const std::lock_guard<std::mutex> lock(mutex_);
  quarantined_.push_back(std::move(window));
}

void Group::retire(std::shared_ptr<Window> window, std::function<bool()> is_unused) {
  const std::lock_guard<std::mutex> lock(mutex_);
  retired_.emplace_back(std::move(window), std::move(is_unused));
}

void Group::free_retired() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(retired_, [](const auto& entry) { return entry.second(); });
}

void Group::add_recoverable(uint64_t buffer_number, std::weak_ptr<Recoverable> buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(recoverables_, [](const auto& entry) { return entry.second.expired(); });
  recoverables_.emplace(buffer_number, std::move(buffer));
}

std::vector<std::string> Group::all_gather(const std::string& payload,
                                           const InterruptCheck& interrupt_check) {
  check_usable(layout::Operation::kNone);
  free_retired();
  return exchange(channel_, gather_sequence_++, payload, false, interrupt_check);
}

std::vector<std::string> Group::exchange(uint64_t channel,
                                         uint64_t sequence,
                                         const std::string& payload,
                                         bool is_recovery,
                                         const InterruptCheck& interrupt_check) {
  std::vector<std::string> payloads(static_cast<size_t>(num_ranks()));
  payloads[static_cast<size_t>(rank_idx_)] = payload;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    if (peer_rank != rank_idx_ && is_active(peer_rank))
      link_->post(members_[static_cast<size_t>(peer_rank)], channel, sequence, payload);
  WaitSite site;
  site.interrupt_check = &interrupt_check;
  const int64_t start_ns = sync::now_ns();
  int64_t warned_ns = start_ns;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (peer_rank == rank_idx_ || !is_active(peer_rank))
      continue;
    std::string* const target = &payloads[static_cast<size_t>(peer_rank)];
    const int link_rank = members_[static_cast<size_t>(peer_rank)];
    bool is_gone = false;
    wait_until(
        *this,
        [&] { return is_gone || link_->take(link_rank, channel, sequence, target); },
        [&] {
          if (interrupt_check)
            interrupt_check();
          if (is_recovery) {
            // A message sent before the death counts: look once more before giving the peer up.
            if (state(peer_rank) != PeerState::kAlive) {
              link_->take(link_rank, channel, sequence, target);
              is_gone = true;
            }
          } else {
            check_abort();
            check_peer(peer_rank, site);
          }
          const int64_t now_ns = sync::now_ns();
          if (now_ns - warned_ns > kWarnEveryNs) {
            warned_ns = now_ns;
            warn(concat("rank ",
                        rank_idx_,
                        " has waited ",
                        (now_ns - start_ns) / 1'000'000'000,
                        " s for rank ",
                        peer_rank,
                        " to arrive"));
          }
          if (now_ns - start_ns > arrival_timeout_ns_) {
            const std::string message = concat("rank ",
                                               peer_rank,
                                               " did not arrive within ",
                                               arrival_timeout_ns_ / 1e9,
                                               " s at a collective call of rank ",
                                               rank_idx_);
            if (!is_recovery)
              abort(layout::AbortCause::kPeerTimeout, site, {peer_rank}, message);
            throw PeerTimeout(message, FailureSite{{peer_rank}, "", "idle", -1});
          }
        });
  }
  return payloads;
}

std::string Group::recovery_payload() const {
  std::string payload;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    const bool has_failed =
        peer_rank != rank_idx_ && (!is_active(peer_rank) || state(peer_rank) != PeerState::kAlive);
    payload.push_back(has_failed ? 1 : 0);
  }
  append_value(&payload, gather_sequence_);
  for (const auto& [buffer_number, weak] : recoverables_) {
    const auto buffer = weak.lock();
    if (!buffer)
      continue;
    const Recoverable::Epochs epochs = buffer->epochs();
    append_value(&payload, BufferEpochs{buffer_number, epochs.next, epochs.num_completed});
  }
  return payload;
}

RecoveryResult Group::recover(const InterruptCheck& interrupt_check) {
  MOE_CHECK(!is_destroyed(), "recover: the communicator has been destroyed");
  MOE_CHECK(getpid() == process_id_,
            "recover: the communicator belongs to process ",
            process_id_,
            " and this is its forked child ",
            getpid());
  // Operations of progress threads see the abort within a sleep slice and end.
  while (num_running_.load() != 0) {
    if (interrupt_check)
      interrupt_check();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // Rounds until all living ranks name the same failed ones. Sets only grow, so this ends.
  const uint64_t channel = channel_ | kRecoveryChannelBit;
  std::vector<std::string> payloads;
  std::vector<int> failed;
  for (bool is_agreed = false; !is_agreed;) {
    const std::string own = recovery_payload();
    payloads = exchange(channel, recovery_round_++, own, true, interrupt_check);
    const auto width = static_cast<size_t>(num_ranks());
    std::string united = own.substr(0, width);
    is_agreed = true;
    for (size_t peer_rank = 0; peer_rank < width; ++peer_rank) {
      if (own[peer_rank] != 0)
        continue;
      const auto& payload = payloads[peer_rank];
      // Short: the peer died in this round, or had agreed a round earlier and was at its end.
      if (payload.size() < width || payload.compare(0, width, own, 0, width) != 0)
        is_agreed = false;
      if (payload.size() < width)
        continue;
      for (size_t i = 0; i < width; ++i)
        united[i] = static_cast<char>(united[i] | payload[i]);
    }
    MOE_CHECK(united[static_cast<size_t>(rank_idx_)] == 0,
              "recover: a peer takes rank ",
              rank_idx_,
              ", which is this one, for failed");
    failed.clear();
    for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
      if (united[static_cast<size_t>(peer_rank)] != 0)
        failed.push_back(peer_rank);
    exclude(failed);
  }
  RecoveryResult result = restart_buffers(payloads);
  result.failed_ranks = failed;
  sync::store_release(own_abort_->state, uint32_t{0});
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    quarantined_.clear();
  }
  // Nobody may start an operation, which could abort, before everybody has cleared its record.
  exchange(channel, recovery_round_++, std::string(1, 'r'), true, interrupt_check);
  return result;
}

void Group::exclude(const std::vector<int>& ranks) {
  for (const int rank : ranks)
    is_active_[static_cast<size_t>(rank)] = 0;
}

RecoveryResult Group::restart_buffers(const std::vector<std::string>& payloads) {
  std::map<uint64_t, BufferEpochs> agreed;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (!is_active(peer_rank))
      continue;
    const auto& payload = payloads[static_cast<size_t>(peer_rank)];
    size_t position = static_cast<size_t>(num_ranks());
    gather_sequence_ = std::max(gather_sequence_, read_value<uint64_t>(payload, &position));
    while (position < payload.size()) {
      const auto epochs = read_value<BufferEpochs>(payload, &position);
      const auto [entry, is_new] = agreed.emplace(epochs.buffer_number, epochs);
      entry->second.next_epoch = std::max(entry->second.next_epoch, epochs.next_epoch);
      entry->second.num_completed = std::min(entry->second.num_completed, epochs.num_completed);
    }
  }
  RecoveryResult result;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [buffer_number, epochs] : agreed) {
    result.completed_epochs.push_back(static_cast<int64_t>(epochs.num_completed) - 1);
    const auto entry = recoverables_.find(buffer_number);
    const auto buffer = entry == recoverables_.end() ? nullptr : entry->second.lock();
    if (buffer)
      buffer->restart(epochs.next_epoch);
  }
  return result;
}

}  // namespace moe::host
