#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/deferred_agreement.h"
#include "runtime/mailbox.h"

namespace moe::runtime {

/// An operation in which no row moved, as every rank found.
struct RefusedOperation {
  uint64_t epoch = 0;  ///< 0 for none
  std::string text;    ///< problem that was found, in it or the operation that it was refused for
};

/// Operations of one buffer in the order of their calls: their numbers, their mailboxes in turn,
/// and those whose rows the host had not heard when their calls returned.
///
/// One thread issues operations, and it alone takes any out; what concerns late verdicts is
/// thread-safe.
class OperationRing {
 public:
  OperationRing(Device& device, int num_ranks, int num_experts);

  /// Numbers of operations of this rank: from 1 on, one after the other.
  uint64_t take_number() { return ++last_number_; }
  Mailbox& take_mailbox(uint64_t number);
  uint64_t take_ticket() { return ++last_ticket_; }

  void push(std::shared_ptr<DeferredAgreement> verdict);
  /// Null for none.
  std::shared_ptr<DeferredAgreement> newest() const;
  bool is_empty() const { return oldest() == nullptr; }

  /// Before operation @p number: takes out what has come; waits for the one whose mailbox it gets
  /// and those before, or for all before it unless it @p runs_ahead; and for all others where one
  /// was found wrong.
  /// @return the first error that nobody has been told, or null. It tells of all of them.
  std::exception_ptr take_heard(uint64_t number,
                                bool runs_ahead,
                                const group::InterruptCheck& interrupt_check);
  /// Takes out all of them, waiting.
  std::exception_ptr take_all(const group::InterruptCheck& interrupt_check);

  /// Waits for the first that has not been heard, and leaves it here.
  /// @return whether there was one.
  bool await_next(const group::InterruptCheck& interrupt_check) const;
  /// Epoch up to which verdicts were taken out; see layout::Row.
  uint64_t heard_epoch() const;

  // Without waiting for anybody.
  /// Hears what has come.
  void hear() const;
  /// See DeferredAgreement::look(): of the operation that the others are behind.
  void look(int64_t now_ns) const;
  /// Returns whether all have come.
  bool is_complete() const;

  /// The last, among the operations that the host has heard. Of the thread that hears them.
  const RefusedOperation& last_refused() const { return last_refused_; }
  void note_refused(RefusedOperation refused) { last_refused_ = std::move(refused); }
  /// An operation was found wrong that peers may hear of in the next one only: there the host hears
  /// rows at once, as does who refuses it, so that one call is enough.
  void force_eager_once() { is_eager_.store(true, std::memory_order_relaxed); }
  bool take_eager_once() { return is_eager_.exchange(false, std::memory_order_relaxed); }

  /// For kernels that were not done at the first look, so far. Of the thread that issues
  /// operations.
  int64_t num_host_waits() const { return num_host_waits_; }
  void count_host_wait() { ++num_host_waits_; }

 private:
  std::vector<std::shared_ptr<DeferredAgreement>> all() const;
  std::shared_ptr<DeferredAgreement> oldest() const;

  std::vector<Mailbox> mailboxes_;
  uint64_t last_ticket_ = 0;
  uint64_t last_number_ = 0;
  int64_t num_host_waits_ = 0;
  RefusedOperation last_refused_;
  std::atomic<bool> is_eager_{false};
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<DeferredAgreement>> verdicts_;
};

}  // namespace moe::runtime
