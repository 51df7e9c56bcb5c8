#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/peer_link.h"

namespace moe::group {

/// A wait of this rank for a peer to enter an operation, for the search for circles of waits.
/// Independent of the communicator that it belongs to, which may end before the last look at it.
class EntryWait {
 public:
  /// Tells one wait from every other on any rank.
  struct Id {
    uint64_t channel = 0;  ///< channel of the communicator, for probes
    int32_t rank_idx = -1;
    uint64_t number = 0;
    bool operator==(const Id&) const = default;
  };

  Id id;
  std::shared_ptr<PeerLink> link;
  int peer_link_rank = -1;
  uint64_t buffer_number = 0;
  uint64_t epoch = 0;
  std::string text;  ///< "rank 0 waits for rank 2 to enter combine of buffer 3, epoch 7"

  void end() { has_ended_.store(true, std::memory_order_relaxed); }
  bool has_ended() const { return has_ended_.load(std::memory_order_relaxed); }
  /// It cannot end: @p circle is who waits for whom.
  void conclude(const std::string& circle);
  std::optional<std::string> verdict() const;

 private:
  std::atomic<bool> has_ended_{false};
  mutable std::mutex mutex_;
  std::optional<std::string> verdict_;
};

class EntryTable;

/// A thread as others see it: what it waits for, in whatever communicator.
class CallerThread {
 public:
  /// The calling thread as the native module whose code this is knows it; goes with the thread.
  static std::shared_ptr<CallerThread> of_this_module();

  uint64_t number() const { return number_; }
  /// Null where it runs, or waits for something else.
  std::shared_ptr<EntryWait> wait() const;
  void set_wait(std::shared_ptr<EntryWait> wait);
  /// It waits for what a progress thread does for it; null: no more.
  void set_awaited(std::shared_ptr<EntryTable> table, uint64_t buffer_number);

 private:
  explicit CallerThread(uint64_t number) : number_(number) {}

  const uint64_t number_;
  mutable std::mutex mutex_;
  std::shared_ptr<EntryWait> wait_;
  std::shared_ptr<EntryTable> awaited_table_;
  uint64_t awaited_buffer_ = 0;
};

/// Entries of one rank on one communicator, by thread, and the entries that it waits for.
/// Thread-safe.
class EntryTable {
 public:
  virtual ~EntryTable() = default;

  /// Stands for a buffer where the call is a collective one of the communicator itself.
  static constexpr uint64_t kCollectiveCall = ~uint64_t{0};
  /// And where it is the one that ends them all: `shrink`, `recover` or `grow`.
  static constexpr uint64_t kLeavingCall = kCollectiveCall - 1;

  /// The calling thread. Virtual, as each native module (of the host, of the emulator, of CUDA) has
  /// the variables of threads once: a thread is the same one in all of them only as the module
  /// knows it that made the table.
  virtual std::shared_ptr<CallerThread> this_thread() const;
  /// The calling thread makes calls of its own here; progress threads do not.
  void add_caller();
  /// An operation has begun: peers do not wait for this rank to enter it any more.
  void enter(uint64_t buffer_number, uint64_t epoch);
  void forget(uint64_t buffer_number);
  bool has_entered(uint64_t buffer_number, uint64_t epoch) const;

  /// An operation that a progress thread will enter, or has entered and not ended.
  void queue(uint64_t buffer_number);
  void unqueue(uint64_t buffer_number);
  bool has_queued(uint64_t buffer_number) const;

  void begin(const std::shared_ptr<EntryWait>& wait);
  void end(const std::shared_ptr<EntryWait>& wait);

  /// The wait of this rank inside an operation of that buffer, or null.
  std::shared_ptr<EntryWait> wait_in(uint64_t buffer_number) const;
  /// The wait of the one thread that makes calls here; null where there are several: another
  /// than the waiting one may enter what peers wait for.
  std::shared_ptr<EntryWait> wait_of_caller() const;

  uint64_t next_number() { return num_waits_.fetch_add(1, std::memory_order_relaxed); }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> entered_;  ///< latest epoch by buffer
  std::map<uint64_t, int> num_queued_;    ///< by buffer, none that is 0
  std::vector<std::shared_ptr<EntryWait>> waits_;
  std::vector<std::weak_ptr<CallerThread>> callers_;
  std::atomic<uint64_t> last_caller_{0};
  std::atomic<uint64_t> num_waits_{0};
};

/// Lives as long as an operation that was given to a progress thread.
class QueuedOperation {
 public:
  QueuedOperation(std::shared_ptr<EntryTable> table, uint64_t buffer_number)
      : table_(std::move(table)), buffer_number_(buffer_number) {
    table_->queue(buffer_number_);
  }
  ~QueuedOperation() { table_->unqueue(buffer_number_); }
  QueuedOperation(const QueuedOperation&) = delete;
  QueuedOperation& operator=(const QueuedOperation&) = delete;

 private:
  std::shared_ptr<EntryTable> table_;
  uint64_t buffer_number_;
};

/// Says that the calling thread waits for what the progress thread of a buffer does.
class AwaitedScope {
 public:
  AwaitedScope(std::shared_ptr<EntryTable> table, uint64_t buffer_number)
      : thread_(table->this_thread()) {
    thread_->set_awaited(std::move(table), buffer_number);
  }
  ~AwaitedScope() { thread_->set_awaited(nullptr, 0); }
  AwaitedScope(const AwaitedScope&) = delete;
  AwaitedScope& operator=(const AwaitedScope&) = delete;

 private:
  std::shared_ptr<CallerThread> thread_;
};

}  // namespace moe::group
