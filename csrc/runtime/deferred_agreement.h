#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "layout/row.h"
#include "ops/dispatch.h"
#include "ops/endpoint_base.h"
#include "runtime/absent_peers.h"
#include "runtime/mailbox.h"

namespace moe::runtime {

class DeferredAgreement;

/// An operation whose exchange was launched, and whose rows the host has yet to hear.
struct UnheardOperation {
  // They have settled it before their end.
  const ops::EndpointBase& endpoint;
  Device& device;
  const ControlMemory& control;
  std::shared_ptr<DeferredAgreement> former;  ///< before it in the buffer, until it is judged
  layout::Operation operation = layout::Operation::kNone;
  uint64_t number = 0;               ///< number of the operation, on this rank
  uint64_t first_epoch = 0;          ///< epoch of the operation, if no graphs were there; else 0
  const Mailbox* mailbox = nullptr;  ///< the endpoint's
  uint64_t ticket = 0;
  /// Waits for the rows, and ends the operation as every rank does: once.
  std::function<void(const group::InterruptCheck&)> hear;
};

/// Verdict of all ranks on an operation that was handed out before the host had heard it.
///
/// Its kernels were launched, and move nothing where some rank found something wrong or rows
/// disagree. The host hears so when somebody asks, or in the call behind which it has come; every
/// operation between is refused on every rank (layout::Row::heard_epoch()), as is that call where
/// nobody had been told; see DeviceExchange::report_deferred_error(). The operations of a buffer
/// are judged in their order. Thread-safe.
class DeferredAgreement final : public ops::DeferredJoin {
 public:
  /// @param caller  Stream that the operation was called from.
  static std::shared_ptr<DeferredAgreement> make(UnheardOperation left, const Stream& caller);

  /// Blocks the host until it knows.
  void join(const group::InterruptCheck& interrupt_check) override;
  bool is_complete() override;
  bool has_ended() const override { return is_judged_.load(std::memory_order_acquire); }

  uint64_t number() const { return left_.number; }
  uint64_t first_epoch() const { return left_.first_epoch; }

  /// Until it is judged, by this thread, whose device is this one, or another.
  /// @throws ConcurrentUse  in a handler of a signal that came while this very thread judges.
  void await_judged(const group::InterruptCheck& interrupt_check);
  /// Error that nobody has been told. Once it is judged.
  bool has_untold_error() const { return error_ != nullptr && !is_told_; }
  /// Returns whether somebody has been told of the abort that it ended by.
  bool has_told_abort() const { return is_abort_ && is_told_; }
  bool is_abort() const { return is_abort_; }
  std::exception_ptr take_untold_error() { return is_told_.exchange(true) ? nullptr : error_; }

  /// The operation of a buffer other than @p endpoint that its @p caller is behind, or null.
  static std::shared_ptr<DeferredAgreement> of_another(const ops::EndpointBase& endpoint,
                                                       const Stream& caller);
  /// Before an operation of @p endpoint that is behind this one. Else the host could wait in one
  /// operation for a peer that waits in the other, and nobody would see that they wait for each
  /// other.
  void hear_for(const ops::EndpointBase& endpoint, const group::InterruptCheck& interrupt_check);

  /// In place of a host that waits: ends it where a peer takes no part, as it has destroyed its
  /// buffer; warns of one that does not come. Does not wait for anybody.
  void look(int64_t now_ns);
  /// Hears it and those before where they have come. Does not wait for anybody.
  /// @return whether it is judged.
  bool hear_if_there();

 private:
  explicit DeferredAgreement(UnheardOperation left);
  /// The operation before, null once this one may be judged.
  std::shared_ptr<DeferredAgreement> former() const;
  /// Runs @p body, which has arrivals_ for itself; not where another thread does.
  void try_alone(const std::function<void()>& body);
  void judge(const group::InterruptCheck& interrupt_check);
  void finish(std::exception_ptr error, bool is_told);
  bool has_ticket() const;
  /// Epoch of the operation, as far as the host can know; 0 before it has begun behind graphs.
  uint64_t epoch() const;

  const group::Group* const group_;
  const int64_t start_ns_;
  const pid_t process_id_;
  UnheardOperation left_;
  RowArrivals arrivals_;  ///< arrivals of the thread that is busy

  mutable std::mutex mutex_;  ///< not held while somebody waits: handlers of signals may come here
  std::condition_variable changed_;
  std::thread::id busy_;  ///< nobody, or who looks at it or judges it
  std::atomic<bool> is_judged_{false};
  std::atomic<bool> is_told_{false};
  std::exception_ptr error_;  ///< once it is judged
  bool is_abort_ = false;     ///< the same
};

}  // namespace moe::runtime
