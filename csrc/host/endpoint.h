#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "host/group.h"
#include "host/progress.h"
#include "host/row_kernels.h"
#include "host/thread_pool.h"
#include "host/trace.h"
#include "layout/routing.h"
#include "layout/workspace.h"

namespace moe::host {

struct EndpointConfig {
  int num_experts = 0;
  int64_t num_max_tokens = 0;  ///< of one rank, low-latency; 0 for any
  std::vector<int32_t> expert_rank;
  int depth = 4;
  std::string isa;  ///< empty for the best of this machine
  /// Everything that must be equal on every rank, as (name, value); compared when it is made.
  std::vector<std::pair<std::string, std::string>> agreed;
};

/// One buffer on one rank: its control area, those of its peers, its epochs and its threads.
///
/// One thread issues operations; a progress thread may run them.
class Endpoint : public Recoverable {
 public:
  /// Collective. @throws InvalidArgument  configurations differ; names both values, on every rank.
  static std::shared_ptr<Endpoint> create(std::shared_ptr<Group> group,
                                          EndpointConfig config,
                                          const InterruptCheck& interrupt_check);
  ~Endpoint() override;

  Group& group() const { return *group_; }
  const std::shared_ptr<Group>& shared_group() const { return group_; }
  const EndpointConfig& config() const { return config_; }
  const layout::Placement& placement() const { return placement_; }
  const RowKernels& kernels() const { return *kernels_; }
  int rank_idx() const { return group_->rank_idx(); }
  int num_ranks() const { return group_->num_ranks(); }
  uint64_t buffer_number() const { return buffer_number_; }
  const layout::Workspace& workspace(int rank_idx) const {
    return workspaces_[static_cast<size_t>(rank_idx)];
  }
  const layout::Workspace& own_workspace() const { return workspace(rank_idx()); }
  ThreadPool& threads() { return threads_; }
  ProgressThread& progress() { return progress_; }
  bool is_on_progress_thread() const { return progress_.is_current_thread(); }
  Tracer& tracer() { return tracer_; }

  /// Whether @p total_bytes written by all ranks outgrow the caches, so that streaming stores pay.
  StoreMode store_mode(int64_t total_bytes) const;

  /// Threads split a loop only where it moves enough to pay for waking them.
  void for_tokens(int64_t num_tokens,
                  int64_t total_bytes,
                  const std::function<void(int64_t, int64_t)>& body);

  /// A window of about the size of recent needs, without growing the heap; may be empty.
  std::shared_ptr<Window> guess_window();
  void remember_need(uint64_t bytes);
  uint64_t largest_recent_need() const {
    return *std::max_element(recent_needs_.begin(), recent_needs_.end());
  }

  uint64_t take_epoch() { return next_epoch_++; }
  uint64_t first_epoch() const { return first_epoch_; }
  void complete_epoch(uint64_t epoch) { last_completed_.store(epoch, std::memory_order_relaxed); }

  Epochs epochs() const override {
    return {next_epoch_, last_completed_.load(std::memory_order_relaxed)};
  }
  bool is_idle() const override { return progress_.is_idle(); }
  void restart(uint64_t next_epoch) override;

  /// Waits for operations in flight, aborting them where a peer keeps them from ending; then tells
  /// peers, and gives the control area back once they all did. Local, idempotent.
  void destroy(const InterruptCheck& interrupt_check);
  bool is_destroyed() const { return is_destroyed_; }

 private:
  Endpoint(std::shared_ptr<Group> group, EndpointConfig config);
  void end_operations(const InterruptCheck& interrupt_check);
  void connect(const InterruptCheck& interrupt_check);

  std::shared_ptr<Group> group_;
  EndpointConfig config_;
  layout::Placement placement_;
  const RowKernels* kernels_;
  uint64_t buffer_number_ = 0;
  std::shared_ptr<Window> own_window_;
  std::vector<layout::Workspace> workspaces_;
  uint64_t next_epoch_ = 1;  // 0 is the flag of memory that was never written
  uint64_t first_epoch_ = 1;
  std::atomic<uint64_t> last_completed_{0};
  int64_t cache_bytes_;
  std::vector<uint64_t> recent_needs_;
  size_t next_need_ = 0;
  bool is_destroyed_ = false;
  ThreadPool threads_;
  ProgressThread progress_;
  Tracer tracer_;
};

}  // namespace moe::host
