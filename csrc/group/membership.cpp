#include "group/membership.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace moe::group {

namespace {

// Channels of the link belong to communicators; what a topic adds is none of theirs.
constexpr uint64_t kTopicBits = uint64_t{0xFF} << 56;

int num_usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0)
    return 1;
  return std::max(1, CPU_COUNT(&cores));
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

int64_t seconds_to_ns(double seconds) {
  // A century stands for "no limit" and keeps sums of two times inside 64 bits.
  return static_cast<int64_t>(std::min(seconds, 3.0e9) * 1e9);
}

}  // namespace

Membership::Membership(std::shared_ptr<PeerLink> link,
                       std::shared_ptr<SymmetricMemory> memory,
                       std::vector<int> members,
                       int rank_idx,
                       uint64_t channel,
                       double stall_timeout_s,
                       double arrival_timeout_s,
                       bool is_child,
                       int num_local_ranks,
                       int num_machine_ranks)
    : link_(std::move(link)),
      memory_(std::move(memory)),
      members_(std::move(members)),
      rank_idx_(rank_idx),
      nodes_(checked_layout(static_cast<int>(members_.size()), num_local_ranks)),
      channel_(channel & ~kTopicBits),
      stall_timeout_ns_(seconds_to_ns(stall_timeout_s)),
      arrival_timeout_ns_(seconds_to_ns(arrival_timeout_s)),
      has_spare_cores_((num_machine_ranks == 0 ? nodes_.num_ranks : num_machine_ranks) <=
                       num_usable_cores()),
      process_id_(getpid()),
      is_child_(is_child),
      controls_(members_.size()),
      is_active_(members_.size(), 1),
      has_left_(members_.size()) {
  MOE_CHECK(rank_idx >= 0 && rank_idx < num_ranks(),
            "rank ",
            rank_idx,
            " is not a rank of a group of ",
            num_ranks());
  own_control_ = memory_->allocate(sizeof(layout::ControlBlock));
  sync::fill_shared(own_control_->data(), 0, sizeof(layout::ControlBlock));
  own_ = reinterpret_cast<layout::ControlBlock*>(own_control_->data());
  // Until peers' blocks are known every wait is for a message, which rings the own doorbell.
  std::fill(controls_.begin(), controls_.end(), own_);
  if (nodes_.num_nodes() > 1)
    make_remote_control();
}

Membership::~Membership() {
  // Peers may still store an abort record or ring: the bytes must never serve anything else.
  if (own_control_ && !is_forked_child())
    own_control_->quarantine();
}

layout::ControlBlock* Membership::make_remote_control() {
  if (!remote_control_) {
    remote_control_ = memory_->allocate(sizeof(layout::ControlBlock));
    sync::fill_shared(remote_control_->data(), 0, sizeof(layout::ControlBlock));
  }
  return reinterpret_cast<layout::ControlBlock*>(remote_control_->data());
}

bool Membership::leave() {
  if (is_destroyed_.exchange(true))
    return false;
  // Peers that share a wider communicator's link would not hear of it otherwise.
  if (is_child_)
    post_to_peers(Topic::kLeave, 0, "left");
  return true;
}

void Membership::post_to_peers(Topic topic, uint64_t sequence, const std::string& payload) const {
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    if (is_peer(peer_rank))
      post(peer_rank, topic, sequence, payload);
}

PeerState Membership::state(int rank_idx) const {
  const PeerState link_state = link_->state(link_rank(rank_idx));
  if (!is_child_ || link_state == PeerState::kDead || rank_idx == rank_idx_)
    return link_state;
  auto& has_left = has_left_[static_cast<size_t>(rank_idx)];
  if (!has_left.load(std::memory_order_relaxed)) {
    std::string payload;
    if (take(rank_idx, Topic::kLeave, 0, &payload))
      has_left.store(true, std::memory_order_relaxed);
  }
  return has_left.load(std::memory_order_relaxed) ? PeerState::kLeft : link_state;
}

std::vector<int> Membership::missing_ranks() const {
  std::vector<int> ranks;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    if (is_peer(peer_rank) && state(peer_rank) != PeerState::kAlive)
      ranks.push_back(peer_rank);
  return ranks;
}

std::string Membership::end_of(int peer_rank) const {
  if (state(peer_rank) != PeerState::kDead)
    return concat("rank ", peer_rank, " left");
  if (link_->is_link_lost(link_rank(peer_rank)))
    return concat("the link to rank ", peer_rank, " was lost");
  return concat("rank ", peer_rank, " died");
}

bool Membership::is_forked_child() const {
  return getpid() != process_id_;
}

void Membership::check_fork(const char* what) const {
  MOE_CHECK(!is_forked_child(),
            what,
            ": the communicator belongs to process ",
            process_id_,
            " and this is its forked child ",
            getpid());
}

void Membership::check_process(const char* what) const {
  check_fork(what);
  MOE_CHECK(!is_destroyed(), what, ": the communicator has been destroyed");
}

void Membership::show_presence(uint64_t buffer_number,
                               uint64_t epoch,
                               layout::Operation operation) {
  layout::Presence& own = own_->presence;
  sync::store_relaxed(own.buffer_number, buffer_number);
  sync::store_relaxed(own.epoch, epoch);
  sync::store_relaxed(own.operation, static_cast<int32_t>(operation));
}

void Membership::leave_presence() {
  sync::store_relaxed(own_->presence.operation, static_cast<int32_t>(layout::Operation::kNone));
}

bool Membership::is_present(int rank_idx, uint64_t buffer_number, uint64_t epoch) const {
  const layout::Presence& shown = control(rank_idx).presence;
  return sync::load_relaxed(shown.operation) != static_cast<int32_t>(layout::Operation::kNone) &&
         sync::load_relaxed(shown.buffer_number) == buffer_number &&
         sync::load_relaxed(shown.epoch) == epoch;
}

std::string Membership::location(int rank_idx) const {
  const layout::Presence& shown = control(rank_idx).presence;
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

}  // namespace moe::group
