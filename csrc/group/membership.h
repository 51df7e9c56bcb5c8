#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/node_layout.h"
#include "core/peer_link.h"
#include "core/symmetric_memory.h"
#include "layout/control.h"
#include "layout/row.h"

namespace moe::group {

/// Topics of messages of one communicator: a channel of the link each.
enum class Topic : uint64_t {
  kGather = 0,
  kRecovery = uint64_t{1} << 63,
  kLeave = uint64_t{1} << 62,
  kAbort = uint64_t{1} << 61,
  kRail = uint64_t{1} << 60,  ///< rows that travel over the link
  kShrink = uint64_t{1} << 59,
  kEnd = uint64_t{1} << 58,
  kAwaited = uint64_t{1} << 57,
  kProbe = uint64_t{1} << 56,
};

/// The ranks of one communicator as one of them sees them: who takes part, who lives and on which
/// node, how long it waits for them, what it shows them and which words it shares with them.
///
/// Ranks are the communicator's own, [0, num_ranks). Those of one node share memory; what ranks of
/// other nodes must hear goes over the link. Thread-safe.
class Membership {
 public:
  /// The parameters are those of Group.
  Membership(std::shared_ptr<PeerLink> link,
             std::shared_ptr<SymmetricMemory> memory,
             std::vector<int> members,
             int rank_idx,
             uint64_t channel,
             double stall_timeout_s,
             double arrival_timeout_s,
             bool is_child,
             int num_local_ranks,
             int num_machine_ranks);
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  int rank_idx() const { return rank_idx_; }
  /// The same, for what is held by rank.
  size_t own_idx() const { return static_cast<size_t>(rank_idx_); }
  int num_ranks() const { return static_cast<int>(members_.size()); }
  const NodeLayout& nodes() const { return nodes_; }
  /// Returns whether that rank is on this rank's node: only then does this process see its memory.
  bool is_local(int rank_idx) const { return nodes_.is_same_node(rank_idx, rank_idx_); }
  /// Returns whether the ranks of this machine have a core each.
  bool has_spare_cores() const { return has_spare_cores_; }
  int64_t stall_timeout_ns() const { return stall_timeout_ns_; }
  int64_t arrival_timeout_ns() const { return arrival_timeout_ns_; }
  SymmetricMemory& memory() const { return *memory_; }
  const std::shared_ptr<SymmetricMemory>& shared_memory() const { return memory_; }
  const std::shared_ptr<PeerLink>& link() const { return link_; }
  const std::vector<int>& members() const { return members_; }
  int link_rank(int rank_idx) const { return members_[static_cast<size_t>(rank_idx)]; }

  /// Channel of the link.
  uint64_t channel(Topic topic) const { return channel_ | static_cast<uint64_t>(topic); }
  void post(int rank_idx, Topic topic, uint64_t sequence, const std::string& payload) const {
    link_->post(link_rank(rank_idx), channel(topic), sequence, payload);
  }
  bool take(int rank_idx, Topic topic, uint64_t sequence, std::string* payload) const {
    return link_->take(link_rank(rank_idx), channel(topic), sequence, payload);
  }
  /// Posts to every active peer.
  void post_to_peers(Topic topic, uint64_t sequence, const std::string& payload) const;

  /// Returns whether a rank takes part; false for ranks a recovery has excluded.
  bool is_active(int rank_idx) const { return is_active_[static_cast<size_t>(rank_idx)] != 0; }
  /// Returns whether it is another rank that takes part.
  bool is_peer(int rank_idx) const { return rank_idx != rank_idx_ && is_active(rank_idx); }
  /// The rank takes no part any more.
  void exclude(int rank_idx) { is_active_[static_cast<size_t>(rank_idx)] = 0; }
  /// State of a peer; a thread that sees it gone also sees every flag it stored before.
  PeerState state(int rank_idx) const;
  /// Active peers that are gone.
  std::vector<int> missing_ranks() const;
  /// Text of the end of a peer that is gone: "rank 3 died".
  std::string end_of(int peer_rank) const;

  /// In a forked child nothing of a communicator may be touched: its memory is not mapped there and
  /// its threads do not exist.
  bool is_forked_child() const;
  /// @throws InvalidArgument  in a forked child. Touches nothing shared.
  void check_fork(const char* what) const;
  /// @throws InvalidArgument  in a forked child, or when destroyed. Touches nothing shared.
  void check_process(const char* what) const;

  /// Buffers destroyed from now on go with the communicator: peers hear that this rank left.
  void prepare_to_leave() { is_leaving_.store(true, std::memory_order_relaxed); }
  bool is_leaving() const { return is_leaving_.load(std::memory_order_relaxed); }
  bool is_destroyed() const { return is_destroyed_.load(std::memory_order_relaxed); }

  /// Words that ranks of this node share; of a rank of another node: some that nobody looks at.
  layout::ControlBlock& control(int rank_idx) const {
    return *controls_[static_cast<size_t>(rank_idx)];
  }
  layout::ControlBlock& own_control() const { return *own_; }
  /// Owner of the own block's memory.
  std::shared_ptr<const void> control_memory() const { return own_control_; }
  /// Doorbell of a rank; of one on another node, a doorbell that nobody sleeps on.
  sync::Doorbell& doorbell(int rank_idx) const { return control(rank_idx).doorbell; }
  sync::Doorbell& own_doorbell() const { return own_->doorbell; }

  /// Says which operation this rank has entered, for peers that wait for it on another buffer.
  void show_presence(uint64_t buffer_number, uint64_t epoch, layout::Operation operation);
  void leave_presence();
  /// Returns whether @p rank_idx shows that it is in that operation now; never of a rank of another
  /// node.
  bool is_present(int rank_idx, uint64_t buffer_number, uint64_t epoch) const;
  /// "; it is in combine of buffer 3, epoch 7" or nothing.
  std::string location(int rank_idx) const;

 protected:
  ~Membership();

  /// A control block that nobody else sees.
  layout::ControlBlock* make_remote_control();
  void set_control(int rank_idx, layout::ControlBlock* control) {
    controls_[static_cast<size_t>(rank_idx)] = control;
  }
  Window& own_control_window() { return *own_control_; }
  /// Tells peers that keep the link. @return false where that was done before.
  bool leave();

 private:
  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<SymmetricMemory> memory_;
  std::vector<int> members_;
  int rank_idx_;
  NodeLayout nodes_;
  uint64_t channel_;
  int64_t stall_timeout_ns_;
  int64_t arrival_timeout_ns_;
  bool has_spare_cores_;
  int process_id_;
  bool is_child_;

  std::shared_ptr<Window> own_control_;
  /// Blocks in place of those of ranks of other nodes, and of those that left before this was
  /// made.
  std::shared_ptr<Window> remote_control_;
  layout::ControlBlock* own_ = nullptr;
  std::vector<layout::ControlBlock*> controls_;
  std::vector<uint8_t> is_active_;
  mutable std::vector<std::atomic<bool>> has_left_;  ///< this communicator, not the link
  std::atomic<bool> is_leaving_{false};
  std::atomic<bool> is_destroyed_{false};
};

}  // namespace moe::group
