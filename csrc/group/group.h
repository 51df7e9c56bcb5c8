#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/node_layout.h"
#include "core/peer_link.h"
#include "core/symmetric_memory.h"
#include "group/entry_waits.h"
#include "group/group_shrink.h"
#include "layout/control.h"
#include "layout/row.h"

namespace moe::host {

/// Lets a blocked operation answer its caller's signals; may throw. Empty on progress threads.
using InterruptCheck = std::function<void()>;

/// Where a rank is while it waits: what an error about it says.
struct WaitSite {
  layout::Operation operation = layout::Operation::kNone;
  layout::Phase phase = layout::Phase::kIdle;
  int64_t epoch = -1;          ///< of the buffer, or the number of the call
  uint64_t buffer_number = 0;  ///< or what stands for one in EntryTable
  const InterruptCheck* interrupt_check = nullptr;
  const char* call = "a collective call of the communicator";  ///< where it is no operation
};

/// Part of a buffer that takes part in recovery.
class Recoverable {
 public:
  struct Epochs {
    uint64_t next = 0;
    uint64_t last_completed = 0;  ///< 0 for none
  };
  virtual ~Recoverable() = default;
  virtual Epochs epochs() const = 0;
  /// No operation of this rank runs or waits to run.
  virtual bool is_idle() const = 0;
  /// Continue at @p next_epoch; flags and rows of earlier epochs mean nothing any more.
  virtual void restart(uint64_t next_epoch) = 0;
};

struct RecoveryResult {
  std::vector<int> failed_ranks;
  std::vector<int64_t>
      completed_epochs;  ///< per buffer, last that completed everywhere, -1 for none
};

/// The ranks of one communicator: who lives, what was aborted, small messages between them.
///
/// Ranks are the communicator's own, [0, num_ranks). Those of one node share memory; what ranks of
/// other nodes must hear goes over the link. Thread-safe, except that `all_gather` and `recover`
/// are called by one thread at a time.
class Group {
 public:
  /// @param link     Sockets of the widest communicator.
  /// @param memory   Heap of the widest communicator.
  /// @param members  Rank of every member in the widest communicator.
  /// @param channel  Tells this communicator's messages from others'; equal on every rank.
  /// @param is_child True where peers may leave this communicator and keep the link.
  /// @param num_local_ranks  Of a node; 0 for one node.
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
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank_idx() const { return rank_idx_; }
  int num_ranks() const { return static_cast<int>(members_.size()); }
  const NodeLayout& nodes() const { return nodes_; }
  /// Whether that rank is on this rank's node: only then does this process see its memory.
  bool is_local(int rank_idx) const { return nodes_.is_same_node(rank_idx, rank_idx_); }
  int num_threads() const { return num_threads_; }
  bool has_spare_cores() const { return has_spare_cores_; }
  int64_t stall_timeout_ns() const { return stall_timeout_ns_; }
  int64_t arrival_timeout_ns() const { return arrival_timeout_ns_; }
  SymmetricMemory& memory() { return *memory_; }
  const std::shared_ptr<SymmetricMemory>& shared_memory() const { return memory_; }
  const std::shared_ptr<PeerLink>& link() const { return link_; }
  const std::vector<int>& members() const { return members_; }
  /// Of the link, for rows that travel over it: nobody else posts there.
  uint64_t rail_channel() const { return channel_ | kRailChannelBit; }

  /// Whether a rank takes part; false for ranks a recovery has excluded.
  bool is_active(int rank_idx) const { return is_active_[static_cast<size_t>(rank_idx)]; }
  /// Of a peer; whoever sees it gone also sees every flag it stored before.
  PeerState state(int rank_idx) const;

  /// In a forked child nothing of a communicator may be touched: its memory is not mapped there and
  /// its threads do not exist.
  bool is_forked_child() const;
  /// @throws InvalidArgument  in a forked child. Touches nothing shared.
  void check_fork(const char* what) const;
  /// @throws InvalidArgument  in a forked child, or when destroyed. Touches nothing shared.
  void check_process(const char* what) const;

  /// Of a rank of another node: one that nobody sleeps on.
  sync::Doorbell& doorbell(int rank_idx) {
    return controls_[static_cast<size_t>(rank_idx)]->doorbell;
  }

  /// Says which operation this rank has entered, for peers that wait for it on another buffer.
  void show_presence(uint64_t buffer_number, uint64_t epoch, layout::Operation operation);
  void leave_presence();
  /// Whether @p rank_idx shows that it is in that operation now; never of a rank of another node.
  bool is_present(int rank_idx, uint64_t buffer_number, uint64_t epoch) const;
  /// "; it is in combine of buffer 3, epoch 7" or nothing.
  std::string location(int rank_idx) const;
  sync::Doorbell& own_doorbell() { return doorbell(rank_idx_); }

  /// Address of a place of @p rank_idx, which is_local(); waits until the peer's announcement has
  /// arrived.
  std::byte* resolve(int rank_idx, const Offer& offer, const WaitSite& site) {
    return resolve(*memory_, rank_idx, offer, site);
  }
  /// The same of another heap of this communicator tree.
  std::byte* resolve(SymmetricMemory& memory,
                     int rank_idx,
                     const Offer& offer,
                     const WaitSite& site);

  /// Throws what aborted the communicator, if anything did. One relaxed load otherwise.
  void check_abort() const {
    if (is_aborted()) [[unlikely]]
      throw_abort();
  }

  /// Throws when the communicator is aborted, destroyed or forked away, or when an active peer is
  /// gone; called before an operation publishes anything. A death also aborts, because peers may
  /// wait for this rank, which will not come.
  void check_usable(layout::Operation operation);

  /// What happened to a peer that is gone: "rank 3 died".
  std::string end_of(int peer_rank) const;

  /// Aborts the communicator: stores the record here and at every living peer, wakes all sleepers.
  /// Only the first abort counts. Ranks of other nodes are sent it.
  void abort(layout::AbortCause cause,
             const WaitSite& site,
             const std::vector<int>& ranks,
             const std::string& message);
  /// Aborts every living peer for what aborted this rank. An operation that ends by it calls this
  /// before its caller may write to what peers read: a peer that read it hears of the abort before
  /// it takes what it read for good. Does nothing when nobody aborted.
  void spread_abort();
  [[noreturn]] void throw_abort() const;
  bool is_aborted() const {
    const uint32_t word = sync::load_relaxed(own_abort_->state);
    return word != 0 && layout::AbortRecord::generation(word) >= generation();
  }

  /// For whoever waits without calling anything here, such as a kernel: layout::AbortRecord::state
  /// of this rank, which counts once its generation is at least generation(). Lives as long as
  /// abort_memory().
  const uint32_t* abort_word() const { return &own_abort_->state; }
  std::shared_ptr<const void> abort_memory() const { return own_control_; }
  /// Recoveries that have ended.
  uint32_t generation() const { return generation_.load(std::memory_order_relaxed); }

  /// Keeps a window that peers of an aborted operation may still write to, until recovery.
  void quarantine(std::shared_ptr<Window> window);

  /// Keeps memory of the caller's that peers of an aborted operation may still write to, until
  /// recovery; for good if there is none.
  void keep(std::shared_ptr<void> memory);

  /// Tells peers that this rank has destroyed a buffer, and keeps its control area until every peer
  /// has destroyed its own: one may be about to write there, and learns of the end from its own.
  /// @param windows     The control area, all of its parts.
  /// @param peer_words  By rank, this rank's word in that peer's area; null where there is none.
  /// @param own_words   By rank, that peer's word in the control area; null for one that never
  ///   writes there.
  /// @param next_epoch  First operation that this rank takes no part in, >= 1: what peers read in
  ///   their words.
  void close_control(std::vector<std::shared_ptr<Window>> windows,
                     const std::vector<uint64_t*>& peer_words,
                     std::vector<const uint64_t*> own_words,
                     uint64_t next_epoch = 1);

  /// Ranks of other nodes that end that buffer raise their words from now on, before any wait looks
  /// at them; the service thread does so.
  /// @param closed_words  By rank, its word in this rank's control area.
  void watch_ends(uint64_t buffer_number, std::vector<uint64_t*> closed_words);
  /// From now on the service thread tells peers whom this rank waits for in an operation of that
  /// buffer.
  /// @param awaited_rank  Returns it, -1 for nobody.
  void answer_for(uint64_t buffer_number, std::function<int()> awaited_rank);
  /// The service thread has nothing more to do for that buffer.
  void forget_buffer(uint64_t buffer_number);
  /// Asks a rank whom it waits for in an operation of the buffer of @p site; its service thread
  /// answers.
  /// @return That rank, -1 for nobody; nothing where there is no answer: it is stopped, or gone.
  std::optional<int> ask_awaited(int rank_idx, const WaitSite& site);
  /// What this rank has entered, and for whose entry it waits.
  const std::shared_ptr<EntryTable>& entries() const { return entries_; }
  /// Of the link, for probes of who waits for whom.
  uint64_t probe_channel() const { return channel_ | kProbeChannelBit; }
  /// Tells ranks of other nodes that this rank has destroyed a buffer, as close_control() does on
  /// this node.
  void post_end(uint64_t buffer_number, uint64_t next_epoch);

  /// Every active rank's payload, in rank order; "" for excluded ranks. Collective.
  std::vector<std::string> all_gather(const std::string& payload,
                                      const InterruptCheck& interrupt_check);

  /// How the survivors of failures leave this group for a new one.
  ShrinkAgreement& shrink_agreement() { return *shrink_agreement_; }
  /// Of the link, for the messages of shrink_agreement().
  uint64_t shrink_channel() const { return channel_ | kShrinkChannelBit; }

  /// Makes the buffers of the living usable again. Collective over the living.
  RecoveryResult recover(const InterruptCheck& interrupt_check);

  /// Number of the next collective call, equal on every rank: names a buffer made by that call.
  uint64_t next_gather_sequence() const { return gather_sequence_; }
  void add_recoverable(uint64_t buffer_number, std::weak_ptr<Recoverable> buffer);

  /// Buffers destroyed from now on go with the communicator: peers hear that this rank left.
  void prepare_to_leave() { is_leaving_.store(true, std::memory_order_relaxed); }
  bool is_leaving() const { return is_leaving_.load(std::memory_order_relaxed); }
  void destroy();
  bool is_destroyed() const { return is_destroyed_.load(std::memory_order_relaxed); }

  /// Counts operations that run in this process, so that recovery can wait for their end.
  class OperationScope {
   public:
    explicit OperationScope(Group& group) : group_(group) { group_.num_running_.fetch_add(1); }
    ~OperationScope() { group_.num_running_.fetch_sub(1); }
    OperationScope(const OperationScope&) = delete;
    OperationScope& operator=(const OperationScope&) = delete;

   private:
    Group& group_;
  };

 private:
  static constexpr uint64_t kRecoveryChannelBit = uint64_t{1} << 63;
  static constexpr uint64_t kLeaveChannelBit = uint64_t{1} << 62;
  static constexpr uint64_t kAbortChannelBit = uint64_t{1} << 61;
  static constexpr uint64_t kRailChannelBit = uint64_t{1} << 60;
  static constexpr uint64_t kShrinkChannelBit = uint64_t{1} << 59;
  static constexpr uint64_t kEndChannelBit = uint64_t{1} << 58;
  static constexpr uint64_t kAwaitedChannelBit = uint64_t{1} << 57;
  static constexpr uint64_t kProbeChannelBit = uint64_t{1} << 56;
  static constexpr uint64_t kReservedChannelBits =
      kRecoveryChannelBit | kLeaveChannelBit | kAbortChannelBit | kRailChannelBit |
      kShrinkChannelBit | kEndChannelBit | kAwaitedChannelBit | kProbeChannelBit;
  friend class ShrinkAgreement;

  /// What ranks have said in the recovery that is under way. Outlives a call that ended early, so
  /// that the next one goes on where it stopped.
  struct Recovery {
    std::vector<std::string> proposals;  ///< by rank, the latest; "" for none yet
    std::vector<uint8_t> has_committed;  ///< by rank
    std::string decision;                ///< what this rank has committed to; "" for none yet
  };

  std::byte* make_remote_control();
  std::byte* find_control(int peer_rank, const Offer& offer, const WaitSite& site);
  void await_announcement(int rank_idx, const WaitSite& site, const std::function<bool()>& is_here);
  void store_abort(layout::ControlBlock& control, const layout::AbortRecord& record);
  void store_abort_at_peers(const layout::AbortRecord& record);
  void take_mail();
  void answer_questions();
  void answer_probes();
  void take_remote_ends_locked();
  void take_remote_aborts_locked();
  /// Whether what aborted this rank is known here in full; waits for its writer a little.
  bool await_abort_record() const;
  void check_evicted() const;
  std::vector<int> missing_ranks() const;
  layout::Presence& presence(int rank_idx) const {
    return controls_[static_cast<size_t>(rank_idx)]->presence;
  }
  struct RetiredControl {
    std::vector<std::shared_ptr<Window>> windows;
    std::vector<const uint64_t*> closed_words;  ///< by rank
  };
  void free_retired();
  bool has_running_operations();
  void end_operations(const InterruptCheck& interrupt_check, const char* purpose);
  bool step_recovery();
  void propose();
  bool is_agreed() const;
  std::string merge_proposals() const;
  RecoveryResult commit(const std::string& decision);
  int first_missing_in_recovery() const;
  void abort_to(const char* purpose);
  std::string own_epochs();
  void post_to_peers(uint64_t channel, uint64_t sequence, const std::string& payload);

  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<SymmetricMemory> memory_;
  std::vector<int> members_;
  int rank_idx_;
  NodeLayout nodes_;
  uint64_t channel_;
  int64_t stall_timeout_ns_;
  int64_t arrival_timeout_ns_;
  int num_threads_;
  bool has_spare_cores_;
  int process_id_;
  bool is_child_;

  std::shared_ptr<Window> own_control_;
  /// What stands for the blocks of ranks of other nodes, and of those that left before this was
  /// made.
  std::shared_ptr<Window> remote_control_;
  std::vector<layout::ControlBlock*> controls_;
  layout::ControlBlock* own_ = nullptr;
  layout::AbortRecord* own_abort_ = nullptr;
  sync::Mutex mail_mutex_;  ///< the link's thread takes them, and recovery
  std::map<uint64_t, std::vector<uint64_t*>> closed_words_;  ///< by buffer number, then by rank
  std::map<uint64_t, std::function<int()>> awaited_ranks_;   ///< by buffer number
  std::atomic<uint64_t> num_questions_{0};
  std::atomic<uint32_t> posted_abort_{0};  ///< 1 + generation of the last abort sent to other nodes
  std::vector<uint8_t> is_active_;
  mutable std::vector<std::atomic<bool>> has_left_;  ///< this communicator, not the link
  int listener_id_ = -1;

  std::shared_ptr<EntryTable> entries_ = std::make_shared<EntryTable>();
  uint64_t gather_sequence_ = 0;
  Recovery recovery_;
  RecoveryResult recovery_result_;
  std::atomic<uint32_t> generation_{0};  ///< recoveries that have ended
  std::atomic<bool> is_recovery_unfinished_{false};
  std::unique_ptr<ShrinkAgreement> shrink_agreement_;
  std::atomic<bool> is_shrink_unfinished_{false};
  std::atomic<int> num_running_{0};
  std::atomic<bool> is_leaving_{false};
  std::atomic<bool> is_destroyed_{false};

  sync::Mutex mutex_;
  std::vector<std::shared_ptr<Window>> quarantined_;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<RetiredControl> retired_;
  std::map<uint64_t, std::weak_ptr<Recoverable>> recoverables_;
};

}  // namespace moe::host
