#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/sync.h"
#include "group/wait_site.h"

namespace moe::group {

class Peers;
class RetiredMemory;

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

/// Ends the operations of a communicator, and lets the living make its buffers usable again.
///
/// Every rank proposes which ranks have failed, and at which epochs its own buffers stand; it
/// proposes again whenever it learns of another failure. A rank that sees the same set proposed by
/// everybody outside that set commits to it, tells the others, and never goes back on it; a rank
/// that hears of a commitment makes it its own, unless it has proposed that the committing rank
/// has failed: others may have agreed on that. The call ends when every living rank has committed.
/// A rank that dies after somebody committed is found by the next operation, and excluded by the
/// next recovery.
class Recovery {
 public:
  Recovery(Peers& peers, RetiredMemory& retired) : peers_(peers), retired_(retired) {}
  Recovery(const Recovery&) = delete;
  Recovery& operator=(const Recovery&) = delete;

  /// Collective over the living; by one thread at a time. What ranks have said outlives a call that
  /// ended early, so that the next one goes on where it stopped.
  RecoveryResult recover(const InterruptCheck& interrupt_check);
  /// Returns whether the last call has thrown.
  bool is_unfinished() const { return is_unfinished_.load(std::memory_order_relaxed); }

  void add(uint64_t buffer_number, std::weak_ptr<Recoverable> buffer);

  // ---- What shrinking needs too.

  /// Operations that run in this process.
  std::atomic<int>& num_running() { return num_running_; }
  /// Operations of progress threads end by the abort; a stray one is given time, then aborted.
  /// @param purpose  "recover": what ends them.
  void end_operations(const InterruptCheck& interrupt_check, const char* purpose);
  /// Aborts where nobody has, unless this rank has committed.
  void abort_to(const char* purpose);
  /// One BufferEpochs per buffer of this rank.
  std::string own_epochs();

 private:
  bool has_running_operations();
  bool step();
  void propose();
  bool is_agreed() const;
  std::string merge_proposals() const;
  RecoveryResult commit(const std::string& decision);
  int first_missing() const;

  Peers& peers_;
  RetiredMemory& retired_;
  std::vector<std::string> proposals_;  ///< by rank, the latest; "" for none yet
  std::vector<uint8_t> has_committed_;  ///< by rank
  std::string decision_;  ///< proposal that this rank has committed to; "" for none yet
  RecoveryResult result_;
  std::atomic<bool> is_unfinished_{false};
  std::atomic<int> num_running_{0};
  sync::Mutex mutex_;
  std::map<uint64_t, std::weak_ptr<Recoverable>> buffers_;  ///< by number
};

}  // namespace moe::group
