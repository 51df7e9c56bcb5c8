#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/rail.h"
#include "core/sync.h"
#include "layout/replicas.h"
#include "layout/routing.h"
#include "layout/wire_format.h"
#include "layout/workspace.h"
#include "ops/buffer_base.h"
#include "ops/progress.h"

namespace moe::ops {

struct EndpointConfig {
  int num_experts = 0;
  int64_t num_max_tokens = 0;  ///< most tokens of one rank; 0 for any
  int64_t num_max_topk = 0;    ///< choices of a token; 0 for any
  int64_t max_row_bytes = 0;   ///< most bytes of a row with its scale factors; 0 for any
  int64_t hidden = 0;          ///< elements of a row; 0 for any
  int32_t row_type = 0;        ///< type of an element, see dlpack_type(); 0 for any
  std::vector<int32_t> expert_rank;
  int depth = 0;                    ///< depth of the ring
  int num_low_latency_windows = 2;  ///< windows of a device; see WindowRing
  /// Rows are added on the node they lie on before they cross; see docs/nodes.md.
  bool node_reduction = false;
  /// The same on the rank they lie on; see docs/gpu.md. Of ranks of one node.
  bool rank_reduction = false;
  bool balances_replicas = false;  ///< choices may be of logical experts, see balance_replicas()
  std::string isa;  ///< name of the row kernels on the CPU; empty for the best of this machine
  std::shared_ptr<Rail> rail;  ///< rail between nodes; null for the communicator's own sockets
  /// Whether messages between nodes are checked; see layout::MessageId.
  bool checks_messages = false;
  /// Everything that must be equal on every rank, as (name, value); compared when it is made.
  std::vector<std::pair<std::string, std::string>> agreed;
};

/// Times that a rank has waited for every rank on one buffer.
struct WaitStatistics {
  std::vector<int64_t> waited_ns;  ///< [num_ranks]
  std::vector<int64_t> num_waits;  ///< [num_ranks], those that were not over at the first look
};

/// End of one buffer on one rank, on every engine: a control area that the host reads,
/// those of its peers, its epochs and its progress thread.
///
/// One thread issues operations; a progress thread may run them.
class EndpointBase : public BufferBase {
 public:
  const EndpointConfig& config() const { return config_; }
  const layout::Placement& placement() const { return placement_; }
  /// Replicas that later dispatches choose from; null where they choose slots. For the thread that
  /// issues operations.
  const std::shared_ptr<const layout::Replicas>& replicas() const { return replicas_; }
  virtual void balance_replicas(std::shared_ptr<const layout::Replicas> replicas) {
    replicas_ = std::move(replicas);
  }
  /// Control area that the host reads and writes, in the heap of the group. Of a rank of another
  /// node: one that nobody writes to.
  const layout::Workspace& workspace(int rank_idx) const {
    return workspaces_[static_cast<size_t>(rank_idx)];
  }
  const layout::Workspace& own_workspace() const { return workspace(rank_idx()); }
  /// The first operation that @p peer_rank takes no part in, as it has destroyed its buffer; 0 for
  /// none.
  uint64_t closed_epoch(int peer_rank) const {
    return sync::load_acquire(own_workspace().closed(peer_rank).epoch);
  }
  ProgressThread& progress() { return progress_; }
  bool is_on_progress_thread() const override { return progress_.is_current_thread(); }

  /// Since the buffer was made. From any thread, also beside an operation.
  virtual WaitStatistics wait_statistics() const;
  /// Adds to the waits of this rank; called by the thread that waited.
  void add_wait(int rank_idx, int64_t waited_ns) {
    WaitTotal& total = wait_totals_[static_cast<size_t>(rank_idx)];
    total.waited_ns.fetch_add(waited_ns, std::memory_order_relaxed);
    total.num_waits.fetch_add(1, std::memory_order_relaxed);
  }

  /// Memory of rows that peers write or read.
  virtual SymmetricMemory& memory() const = 0;
  /// A window for the rows of a low-latency dispatch, or of its combine, among those that the
  /// buffer has; null where it has none that is free and large enough.
  /// @param is_captured  is_capturing(), as the caller knows
  virtual std::shared_ptr<Window> take_window(uint64_t /*bytes*/, bool /*is_captured*/) {
    return nullptr;
  }
  /// DLPack's type and number of the device whose memory that is.
  virtual int32_t dlpack_device_type() const = 0;
  virtual int32_t device_idx() const = 0;
  /// Returns whether rows cross between devices of one node, as every rank knows alike: each then
  /// goes once to a rank of another device (Arrangement::has_origins).
  virtual bool spans_devices() const { return false; }
  /// Returns whether rows can be quantized to @p format while they are dispatched.
  virtual bool can_quantize(const layout::WireFormat& format, layout::ScaleFormat scale) const = 0;
  /// Returns whether the caller is the host itself, whose tensors are ready and which waits for
  /// results; else it is a stream.
  virtual bool is_host_caller() const { return true; }
  /// Keeper of @p inputs, tensors of an operation, until nothing reads them any more.
  virtual std::shared_ptr<void> keep_inputs(std::shared_ptr<void> inputs) { return inputs; }
  /// Mark of the caller's stream as it is now, for an operation that begins later; null where
  /// the caller is the host.
  virtual std::shared_ptr<const void> mark_caller() { return nullptr; }
  /// Returns whether operations are recorded into a graph instead of run.
  virtual bool is_capturing() const { return false; }
  /// Returns whether operations were recorded into graphs: others are then run by the calling
  /// thread, those that are asynchronous too, so that they and runs of graphs keep the order of the
  /// calls.
  virtual bool has_graphs() const { return false; }

  /// A window of about the size of recent needs, without growing the heap; may be empty.
  std::shared_ptr<Window> guess_window();
  void remember_need(uint64_t bytes);
  uint64_t largest_recent_need() const {
    return *std::max_element(recent_needs_.begin(), recent_needs_.end());
  }

  /// Keeps a further part of the control area, which goes back with it.
  void add_control_window(std::shared_ptr<Window> window) {
    control_windows_.push_back(std::move(window));
  }

  uint64_t first_epoch() const { return first_epoch_; }
  bool is_idle() const override { return progress_.is_idle(); }
  void restart(uint64_t next_epoch) override;

  /// Rank that this one waits for in an operation, -1 when what it waits for has arrived or it does
  /// not wait. From any thread.
  int awaited_rank() const;

  /// Waits for operations in flight, aborting them where a peer keeps them from ending; then tells
  /// peers, and gives the control area back once they all did. Local, idempotent.
  void destroy(const group::InterruptCheck& interrupt_check);
  /// Takes the error of an operation whose caller was not told before the buffer's end; once.
  std::exception_ptr take_untold_error() { return std::exchange(untold_error_, nullptr); }

 protected:
  EndpointBase(std::shared_ptr<group::Group> group, EndpointConfig config);

  /// Makes the control area, a ring of @p depth entries, and finds those of all peers. Collective.
  /// @param extra  Text to exchange, of one size on every rank.
  /// @return the text that every rank gave as @p extra, "" for excluded ranks.
  /// @throws InvalidArgument  configurations differ; names both values, on every rank.
  std::vector<std::string> connect(int depth,
                                   const std::string& extra,
                                   const group::InterruptCheck& interrupt_check);
  /// After connect() threw: peers may write to the control area at any time.
  void give_up_connecting();

  /// Starts what is left of an operation whose caller has not asked for its end. Does not wait;
  /// called by destroy() once the progress thread is idle.
  virtual void start_last_phase() {}
  /// Waits until the ranks have said what they think of an operation whose call has returned, as
  /// long as the call would have waited; called by destroy() once all else has ended.
  virtual void await_verdict(const group::InterruptCheck& /*interrupt_check*/) {}
  /// Ends operations that are still in flight; called by destroy().
  virtual void end_device_operations() {}
  void keep_untold_error(std::exception_ptr error) { untold_error_ = std::move(error); }

 private:
  struct WaitTotal {
    std::atomic<int64_t> waited_ns{0};
    std::atomic<int64_t> num_waits{0};
  };

  void end_operations(const group::InterruptCheck& interrupt_check);

  EndpointConfig config_;
  layout::Placement placement_;
  std::shared_ptr<const layout::Replicas> replicas_;
  std::vector<std::shared_ptr<Window>> control_windows_;
  std::vector<layout::Workspace> workspaces_;
  std::shared_ptr<std::byte> remote_workspace_;  ///< stands for that of every remote rank
  uint64_t first_epoch_ = 1;
  std::vector<WaitTotal> wait_totals_;  ///< [num_ranks]
  std::vector<uint64_t> recent_needs_;
  size_t next_need_ = 0;
  std::exception_ptr untold_error_;
  ProgressThread progress_;
};

}  // namespace moe::ops
