#include "group/group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "group/peer_wait.h"

namespace moe::host {

namespace {

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

NodeLayout checked_layout(int num_ranks, int num_local_ranks) {
  if (num_local_ranks == 0)
    return {num_ranks, num_ranks};
  MOE_CHECK(num_local_ranks > 0 && num_ranks % num_local_ranks == 0,
            "num_local_ranks must divide the ",
            num_ranks,
            " ranks of the group, got ",
            num_local_ranks);
  return {num_ranks, num_local_ranks};
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
             bool is_child,
             const InterruptCheck& interrupt_check,
             int num_local_ranks,
             int num_machine_ranks)
    : link_(std::move(link)),
      memory_(std::move(memory)),
      members_(std::move(members)),
      rank_idx_(rank_idx),
      nodes_(checked_layout(static_cast<int>(members_.size()), num_local_ranks)),
      channel_(channel & ~kReservedChannelBits),
      stall_timeout_ns_(seconds_to_ns(stall_timeout_s)),
      arrival_timeout_ns_(seconds_to_ns(arrival_timeout_s)),
      num_threads_(num_threads),
      has_spare_cores_((num_machine_ranks == 0 ? nodes_.num_ranks : num_machine_ranks) <=
                       num_usable_cores()),
      process_id_(getpid()),
      is_child_(is_child),
      controls_(members_.size()),
      is_active_(members_.size(), 1),
      has_left_(members_.size()),
      shrink_agreement_(std::make_unique<ShrinkAgreement>(*this)) {
  MOE_CHECK(rank_idx >= 0 && rank_idx < num_ranks(),
            "rank ",
            rank_idx,
            " is not a rank of a group of ",
            num_ranks());
  own_control_ = memory_->allocate(sizeof(layout::ControlBlock));
  sync::fill_shared(own_control_->data(), 0, sizeof(layout::ControlBlock));
  own_ = reinterpret_cast<layout::ControlBlock*>(own_control_->data());
  own_abort_ = &own_->abort;
  // Until peers' blocks are known every wait is for a message, which rings the own doorbell.
  std::fill(controls_.begin(), controls_.end(), own_);
  if (nodes_.num_nodes() > 1)
    make_remote_control();
  listener_id_ = link_->add_listener([this] {
    take_mail();
    answer_questions();
    answer_probes();
    sync::ring(own_->doorbell);
  });
  try {
    const Offer own_offer = own_control_->offer();
    const std::string payload(reinterpret_cast<const char*>(&own_offer), sizeof(own_offer));
    const auto payloads = all_gather(payload, interrupt_check);
    WaitSite site;
    site.interrupt_check = &interrupt_check;
    for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
      Offer offer;
      std::memcpy(&offer, payloads[static_cast<size_t>(peer_rank)].data(), sizeof(offer));
      std::byte* const control =
          is_local(peer_rank) ? find_control(peer_rank, offer, site) : make_remote_control();
      controls_[static_cast<size_t>(peer_rank)] = reinterpret_cast<layout::ControlBlock*>(control);
    }
    // Nobody may write to a peer's block before that peer zeroed it: the gather above ordered that.
  } catch (...) {
    link_->remove_listener(listener_id_);
    own_control_->quarantine();
    throw;
  }
}

/// A control block that nobody else sees.
std::byte* Group::make_remote_control() {
  if (!remote_control_) {
    remote_control_ = memory_->allocate(sizeof(layout::ControlBlock));
    sync::fill_shared(remote_control_->data(), 0, sizeof(layout::ControlBlock));
  }
  return remote_control_->data();
}

/// Where ranks are threads, one that had its group and left has taken its memory along: that is no
/// failure, and there is nobody to ring any more.
std::byte* Group::find_control(int peer_rank, const Offer& offer, const WaitSite& site) {
  const int link_rank = members_[static_cast<size_t>(peer_rank)];
  std::byte* control = memory_->try_resolve(link_rank, offer);
  if (control != nullptr) [[likely]]
    return control;
  await_announcement(peer_rank, site, [&] {
    // Looked at first: what a peer announced before it left is there once it is seen gone.
    const bool has_left = state(peer_rank) == PeerState::kLeft;
    control = memory_->try_resolve(link_rank, offer);
    return control != nullptr || has_left;
  });
  return control != nullptr ? control : make_remote_control();
}

Group::~Group() {
  if (is_forked_child())
    return;
  destroy();
  // Peers may still store an abort record or ring: the bytes must never serve anything else.
  if (own_control_)
    own_control_->quarantine();
  for (auto& window : quarantined_)
    window->quarantine();
  // The words alone decide now: a peer that has set its own touches the window no more.
  for (auto& [windows, closed_words] : retired_) {
    const bool is_unused = std::all_of(closed_words.begin(), closed_words.end(), [](auto* word) {
      return word == nullptr || sync::load_acquire(*word) != 0;
    });
    for (auto& window : windows)
      if (!is_unused)
        window->quarantine();
  }
  for (auto& memory : kept_)
    new std::shared_ptr<void>(std::move(memory));  // for good
}

void Group::destroy() {
  if (is_forked_child() || is_destroyed_.exchange(true))
    return;
  // Peers that share a wider communicator's link would not hear of it otherwise.
  if (is_child_)
    post_to_peers(channel_ | kLeaveChannelBit, 0, "left");
  link_->remove_listener(listener_id_);
}

PeerState Group::state(int rank_idx) const {
  const int link_rank = members_[static_cast<size_t>(rank_idx)];
  const PeerState link_state = link_->state(link_rank);
  if (!is_child_ || link_state == PeerState::kDead || rank_idx == rank_idx_)
    return link_state;
  auto& has_left = has_left_[static_cast<size_t>(rank_idx)];
  if (!has_left.load(std::memory_order_relaxed)) {
    std::string payload;
    if (link_->take(link_rank, channel_ | kLeaveChannelBit, 0, &payload))
      has_left.store(true, std::memory_order_relaxed);
  }
  return has_left.load(std::memory_order_relaxed) ? PeerState::kLeft : link_state;
}

bool Group::is_forked_child() const {
  return getpid() != process_id_;
}

void Group::check_fork(const char* what) const {
  MOE_CHECK(!is_forked_child(),
            what,
            ": the communicator belongs to process ",
            process_id_,
            " and this is its forked child ",
            getpid());
}

void Group::check_process(const char* what) const {
  check_fork(what);
  MOE_CHECK(!is_destroyed(), what, ": the communicator has been destroyed");
}

void Group::post_to_peers(uint64_t channel, uint64_t sequence, const std::string& payload) {
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    if (peer_rank != rank_idx_ && is_active(peer_rank))
      link_->post(members_[static_cast<size_t>(peer_rank)], channel, sequence, payload);
}

std::byte* Group::resolve(SymmetricMemory& memory,
                          int rank_idx,
                          const Offer& offer,
                          const WaitSite& site) {
  const int link_rank = members_[static_cast<size_t>(rank_idx)];
  std::byte* address = memory.try_resolve(link_rank, offer);
  if (address != nullptr) [[likely]]
    return address;
  MOE_CHECK(is_local(rank_idx),
            "memory of rank ",
            rank_idx,
            " on node ",
            nodes_.node_idx(rank_idx),
            " is not seen by rank ",
            rank_idx_,
            " on node ",
            nodes_.node_idx(rank_idx_));
  await_announcement(
      rank_idx, site, [&] { return (address = memory.try_resolve(link_rank, offer)) != nullptr; });
  return address;
}

/// Waits until @p is_here, for memory that @p rank_idx has said it has.
void Group::await_announcement(int rank_idx,
                               const WaitSite& site,
                               const std::function<bool()>& is_here) {
  constexpr const char* kAwaited = "the announcement of memory that it offered";
  const int64_t start_ns = sync::now_ns();
  await_peer(*this, site, is_here, [&](int64_t now_ns) {
    check_gone(
        *this, site, [&](int peer_rank) { return peer_rank == rank_idx && !is_here(); }, kAwaited);
    if (now_ns - start_ns > stall_timeout_ns_)
      give_up_stalled(*this, site, rank_idx, stall_timeout_ns_, kAwaited);
  });
}

void Group::check_usable(layout::Operation operation) {
  const char* const name =
      operation == layout::Operation::kNone ? "collective call" : layout::operation_name(operation);
  check_process(name);
  check_abort();
  if (is_recovery_unfinished_.load(std::memory_order_relaxed)) [[unlikely]]
    throw PeerFailed(concat(name, ": the last recover() of rank ", rank_idx_, " has not ended"),
                     FailureSite{missing_ranks(), name, "idle", -1});
  if (is_shrink_unfinished_.load(std::memory_order_relaxed)) [[unlikely]]
    throw PeerFailed(concat(name, ": the last shrink() of rank ", rank_idx_, " has not ended"),
                     FailureSite{missing_ranks(), name, "idle", -1});
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (!is_active(peer_rank) || peer_rank == rank_idx_)
      continue;
    const PeerState peer_state = state(peer_rank);
    if (peer_state == PeerState::kAlive) [[likely]]
      continue;
    check_evicted();
    const std::string message = concat(end_of(peer_rank),
                                       peer_state == PeerState::kDead ? "" : " the communicator",
                                       " before this ",
                                       name,
                                       " of rank ",
                                       rank_idx_);
    if (peer_state == PeerState::kDead) {
      WaitSite site;
      site.operation = operation;
      abort(layout::AbortCause::kPeerFailed, site, {peer_rank}, message);
      throw_abort();
    }
    throw PeerFailed(message, FailureSite{{peer_rank}, name, "idle", -1});
  }
}

std::string Group::end_of(int peer_rank) const {
  if (state(peer_rank) != PeerState::kDead)
    return concat("rank ", peer_rank, " left");
  if (link_->is_link_lost(members_[static_cast<size_t>(peer_rank)]))
    return concat("the link to rank ", peer_rank, " was lost");
  return concat("rank ", peer_rank, " died");
}

void Group::abort(layout::AbortCause cause,
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
  std::strncpy(record.message, message.c_str(), sizeof(record.message) - 1);
  store_abort(*own_, record);
  store_abort_at_peers(record);
}

void Group::store_abort_at_peers(const layout::AbortRecord& record) {
  // To other nodes once: who has sent one abort of a generation has nothing new to say.
  const bool has_posted = posted_abort_.exchange(generation() + 1) == generation() + 1;
  const std::string message(reinterpret_cast<const char*>(&record), sizeof(record));
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (peer_rank == rank_idx_ || !is_active(peer_rank) || state(peer_rank) != PeerState::kAlive)
      continue;
    const auto idx = static_cast<size_t>(peer_rank);
    if (is_local(peer_rank))
      store_abort(*controls_[idx], record);
    else if (!has_posted)
      link_->post(members_[idx], channel_ | kAbortChannelBit, generation(), message);
  }
  // What this rank stores from now on is seen by nobody who does not see the abort as well.
  sync::fence_seq_cst();
}

void Group::spread_abort() {
  if (!is_aborted() || !await_abort_record())
    return;
  layout::AbortRecord record{};
  sync::read_body<sizeof(record.state)>(record, *own_abort_);
  store_abort_at_peers(record);
}

void Group::store_abort(layout::ControlBlock& control, const layout::AbortRecord& record) {
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

bool Group::await_abort_record() const {
  // The writer may have been killed between its two stores: what it wrote is then unknown.
  const int64_t limit_ns = sync::now_ns() + 100'000'000;
  const auto is_there = [this] {
    return layout::AbortRecord::is_set(sync::load_acquire(own_abort_->state));
  };
  while (!is_there()) {
    if (sync::now_ns() >= limit_ns)
      return is_there();
    sync::yield();
  }
  return true;
}

/// Who goes on without this rank has said so before it let this rank find out.
void Group::check_evicted() const {
  link_->catch_up();
  shrink_agreement_->check_evicted();
}

void Group::throw_abort() const {
  check_evicted();
  if (!await_abort_record()) {
    throw PeerFailed("a rank died while it aborted the communicator",
                     FailureSite{missing_ranks(), "", "idle", -1});
  }
  layout::AbortRecord record;
  sync::read_body<sizeof(record.state)>(record, *own_abort_);
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
    if (std::find(site.ranks.begin(), site.ranks.end(), rank_idx_) != site.ranks.end())
      throw Evicted(concat(record.message, "; rank ", rank_idx_, " is this one"),
                    FailureSite{declarer, "shrink", "idle", -1});
  }
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
  const std::lock_guard<sync::Mutex> lock(mutex_);
  quarantined_.push_back(std::move(window));
}

void Group::keep(std::shared_ptr<void> memory) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  kept_.push_back(std::move(memory));
}

void Group::show_presence(uint64_t buffer_number, uint64_t epoch, layout::Operation operation) {
  layout::Presence& own = presence(rank_idx_);
  sync::store_relaxed(own.buffer_number, buffer_number);
  sync::store_relaxed(own.epoch, epoch);
  sync::store_relaxed(own.operation, static_cast<int32_t>(operation));
}

void Group::leave_presence() {
  sync::store_relaxed(presence(rank_idx_).operation,
                      static_cast<int32_t>(layout::Operation::kNone));
}

bool Group::is_present(int rank_idx, uint64_t buffer_number, uint64_t epoch) const {
  const layout::Presence& shown = presence(rank_idx);
  return sync::load_relaxed(shown.operation) != static_cast<int32_t>(layout::Operation::kNone) &&
         sync::load_relaxed(shown.buffer_number) == buffer_number &&
         sync::load_relaxed(shown.epoch) == epoch;
}

std::string Group::location(int rank_idx) const {
  const layout::Presence& shown = presence(rank_idx);
  const auto operation = static_cast<layout::Operation>(sync::load_relaxed(shown.operation));
  if (operation == layout::Operation::kNone)
    return "";
  return concat("; it is in ",
                layout::operation_name(operation),
                " of buffer ",
                sync::load_relaxed(shown.buffer_number),
                ", epoch ",
                sync::load_relaxed(shown.epoch));
}

void Group::close_control(std::vector<std::shared_ptr<Window>> windows,
                          const std::vector<uint64_t*>& peer_words,
                          std::vector<const uint64_t*> own_words,
                          uint64_t next_epoch) {
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    uint64_t* const word = peer_words[static_cast<size_t>(peer_rank)];
    if (word == nullptr || is_leaving())
      continue;
    sync::store_release(*word, next_epoch);
    sync::ring(doorbell(peer_rank));
  }
  const std::lock_guard<sync::Mutex> lock(mutex_);
  retired_.push_back({std::move(windows), std::move(own_words)});
}

void Group::free_retired() {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  std::erase_if(retired_, [this](const RetiredControl& retired) {
    for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
      const uint64_t* const word = retired.closed_words[static_cast<size_t>(peer_rank)];
      const bool is_gone = !is_active(peer_rank) || state(peer_rank) != PeerState::kAlive;
      if (word != nullptr && !is_gone && sync::load_acquire(*word) == 0)
        return false;
    }
    return true;
  });
}

void Group::add_recoverable(uint64_t buffer_number, std::weak_ptr<Recoverable> buffer) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  std::erase_if(recoverables_, [](const auto& entry) { return entry.second.expired(); });
  recoverables_.emplace(buffer_number, std::move(buffer));
}

std::vector<std::string> Group::all_gather(const std::string& payload,
                                           const InterruptCheck& interrupt_check) {
  check_usable(layout::Operation::kNone);
  free_retired();
  const uint64_t sequence = gather_sequence_++;
  entries_->add_caller();
  entries_->enter(EntryTable::kCollectiveCall, sequence);
  post_to_peers(channel_, sequence, payload);
  std::vector<std::string> payloads(static_cast<size_t>(num_ranks()));
  std::vector<uint8_t> has_arrived(payloads.size());
  payloads[static_cast<size_t>(rank_idx_)] = payload;
  // A message that was sent before its sender left or died counts.
  const auto is_missing = [&](int peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    if (has_arrived[idx] == 0)
      has_arrived[idx] = link_->take(members_[idx], channel_, sequence, &payloads[idx]);
    return has_arrived[idx] == 0;
  };
  WaitSite site;
  site.buffer_number = EntryTable::kCollectiveCall;
  site.epoch = static_cast<int64_t>(sequence);
  site.interrupt_check = &interrupt_check;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (peer_rank == rank_idx_ || !is_active(peer_rank) || !is_missing(peer_rank))
      continue;
    ArrivalWatch arrival(*this, site, peer_rank);
    await_peer(
        *this,
        site,
        [&] { return !is_missing(peer_rank); },
        [&](int64_t now_ns) {
          check_gone(*this, site, is_missing);
          arrival.check(now_ns, is_missing);
        });
  }
  return payloads;
}

}  // namespace moe::host
