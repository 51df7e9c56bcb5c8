#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/row_kernels.h"
#include "cpu/thread_pool.h"
#include "layout/copy_control.h"
#include "ops/buffer_base.h"
#include "ops/prepared_copies.h"

namespace moe::ops {

struct BatchedCopyConfig {
  int64_t slot_bytes = 0;  ///< a multiple of 64; 0 for what suits the machine's cache
  int num_slots = 0;       ///< slots for each that receives from a rank; 0 for the default
};

/// Bytes and times of one run, on this rank.
struct CopyStats {
  int64_t direct_bytes = 0;  ///< sent in place into peers' memory
  int64_t slot_bytes = 0;    ///< sent through slots
  int64_t local_bytes = 0;   ///< copied within this rank
  int64_t copy_ns = 0;       ///< moving bytes, and waiting for peers' bytes
  int64_t total_ns = 0;      ///< the whole run
};

/// Copies between the tensors of all ranks, many at once: one end per rank, with its control area,
/// its slots and its epochs.
///
/// One run at a time.
class BatchedCopy : public BufferBase {
 public:
  /// Collective. @throws InvalidArgument  ranks configure it differently; on every rank.
  static std::shared_ptr<BatchedCopy> create(std::shared_ptr<group::Group> group,
                                             BatchedCopyConfig config,
                                             const group::InterruptCheck& interrupt_check);
  ~BatchedCopy() override;

  const BatchedCopyConfig& config() const { return config_; }
  const char* noun() const override { return "batched copy"; }

  /// Collective. @throws InvalidArgument, CapacityError  on every rank, before data moves;
  /// PeerFailed, PeerTimeout  the communicator is aborted, destinations are undefined.
  /// @param with_checksums  Sources are hashed as they are copied, see
  /// PreparedCopies::checksum_of().
  CopyStats run(const std::shared_ptr<PreparedCopies>& prepared,
                bool with_checksums,
                const group::InterruptCheck& interrupt_check);

  /// Takes part in a run that cannot be, and throws @p message as every rank does.
  [[noreturn]] void reject(const std::string& message,
                           const group::InterruptCheck& interrupt_check);

  bool is_idle() const override { return runner_.load() == std::thread::id(); }

  /// Tells peers, and gives memory back once they need it no more. Local, idempotent.
  /// Waits for a run of another thread to end; aborts the communicator if peers keep it too long.
  void destroy();

  // ---- What a CopyRun uses.

  const layout::CopyWorkspace& workspace(int rank_idx) const {
    return workspaces_[static_cast<size_t>(rank_idx)];
  }
  const layout::CopyWorkspace& own_workspace() const { return workspace(rank_idx()); }
  const cpu::RowKernels& kernels() const { return *kernels_; }
  cpu::ThreadPool& threads() { return threads_; }
  int64_t cache_bytes() const { return cache_bytes_; }
  uint64_t take_table_number() { return ++last_table_number_; }

  /// Slots that this rank fills for @p readers: CopySlots, for @p bytes, at most num_slots for
  /// each. Nobody may be in a run that used those that there were. @throws CapacityError
  const Window& slots(const std::vector<int>& readers, int64_t bytes);
  /// Peers may still write to what is in front of the slots: the next run gets others.
  void quarantine_slots();

 private:
  BatchedCopy(std::shared_ptr<group::Group> group, BatchedCopyConfig config);
  void connect(const group::InterruptCheck& interrupt_check);
  void end_run();

  BatchedCopyConfig config_;
  const cpu::RowKernels* kernels_;
  int64_t cache_bytes_;
  std::shared_ptr<Window> own_window_;
  std::vector<layout::CopyWorkspace> workspaces_;
  std::map<std::vector<int>, std::shared_ptr<Window>> slots_;  ///< windows by who reads them
  uint64_t last_table_number_ = 0;
  std::atomic<std::thread::id> runner_{};  ///< thread that is in a run; none when default
  cpu::ThreadPool threads_;
};

}  // namespace moe::ops
