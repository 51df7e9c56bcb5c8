#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "group/group_shrink.h"
#include "group/peers.h"
#include "group/recovery.h"
#include "group/retired_memory.h"
#include "group/wait_site.h"

namespace moe::group {

/// The ranks of one communicator, and what they do together besides the operations of buffers: they
/// gather, and have one part each for memory that peers may still write to, and for going on after
/// a failure, with the same group or with another.
///
/// Thread-safe, except that `all_gather` and `recover` are called by one thread at a time.
class Group : public Peers {
 public:
  /// @param link     Sockets of the widest communicator.
  /// @param memory   Heap of the widest communicator.
  /// @param members  Rank of every member in the widest communicator.
  /// @param channel  Tells this communicator's messages from others'; equal on every rank.
  /// @param is_child True where peers may leave this communicator and keep the link.
  /// @param num_local_ranks  Ranks of a node; 0 for one node.
  /// @param num_machine_ranks  Ranks that share this machine's cores; 0 for all.
  /// Collective: exchanges control blocks.
  Group(std::shared_ptr<PeerLink> link,
        std::shared_ptr<SymmetricMemory> memory,
        std::vector<int> members,
        int rank_idx,
        uint64_t channel,
        double stall_timeout_s,
        double arrival_timeout_s,
        int num_threads,
        bool is_child,
        const InterruptCheck& interrupt_check,
        int num_local_ranks = 0,
        int num_machine_ranks = 0);
  ~Group();

  int num_threads() const { return num_threads_; }
  RetiredMemory& retired() { return retired_; }
  Recovery& recovery() { return recovery_; }
  /// The way of the survivors of failures from this group into a new one.
  ShrinkAgreement& shrink_agreement() { return shrink_agreement_; }

  /// Tells peers. Local, idempotent.
  void destroy();

  /// Address of a place of @p rank_idx, which is_local(); waits until the peer's announcement has
  /// arrived.
  std::byte* resolve(int rank_idx, const Offer& offer, const WaitSite& site) {
    return resolve(memory(), rank_idx, offer, site);
  }
  /// The same of another heap of this communicator tree.
  std::byte* resolve(SymmetricMemory& memory,
                     int rank_idx,
                     const Offer& offer,
                     const WaitSite& site);

  /// Every active rank's payload, in rank order; "" for excluded ranks. Collective.
  std::vector<std::string> all_gather(const std::string& payload,
                                      const InterruptCheck& interrupt_check);

  /// Throws when the communicator is aborted, destroyed or forked away, or when an active peer is
  /// gone; called before an operation publishes anything. A death also aborts, because peers may
  /// wait for this rank, which will not come.
  void check_usable(layout::Operation operation);

  // ---- Recovery.

  /// Makes the buffers of the living usable again. Collective over the living.
  RecoveryResult recover(const InterruptCheck& interrupt_check) {
    return recovery_.recover(interrupt_check);
  }
  void add_recoverable(uint64_t buffer_number, std::weak_ptr<Recoverable> buffer) {
    recovery_.add(buffer_number, std::move(buffer));
  }
  /// Counts operations that run in this process, so that recovery can wait for their end.
  class OperationScope {
   public:
    explicit OperationScope(Group& group) : num_running_(group.recovery_.num_running()) {
      num_running_.fetch_add(1);
    }
    ~OperationScope() { num_running_.fetch_sub(1); }
    OperationScope(const OperationScope&) = delete;
    OperationScope& operator=(const OperationScope&) = delete;

   private:
    std::atomic<int>& num_running_;
  };

 private:
  layout::ControlBlock* find_control(int peer_rank, const Offer& offer, const WaitSite& site);
  void await_announcement(int rank_idx, const WaitSite& site, const std::function<bool()>& is_here);

  int num_threads_;
  RetiredMemory retired_{*this};
  Recovery recovery_{*this, retired_};
  ShrinkAgreement shrink_agreement_{*this, recovery_};
  int listener_id_ = -1;
};

}  // namespace moe::group
