#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group/peer_wait.h"
#include "kernels/exchange.h"
#include "ops/agreement.h"
#include "ops/buffer_operation.h"
#include "runtime/device_endpoint.h"

namespace moe::runtime {

/// Takes the count matrix of rows that agree, of an epoch. @return what every rank finds wrong with
/// it, or null.
using TakeCounts = std::function<std::exception_ptr(ops::Rows, uint64_t)>;

/// An operation whose exchange was launched, and whose rows the host has yet to hear.
struct RemainingRows {
  ops::RemainingOperation operation;
  uint64_t number = 0;               ///< of the operation, on this rank
  const Mailbox* mailbox = nullptr;  ///< the endpoint's
  uint64_t ticket = 0;
  TakeCounts take_counts;  ///< none where rows come without counts
};

/// Warns of a peer whose row does not come, and gives up where it cannot. The limit is the
/// kernel's.
class RowArrivals {
 public:
  /// @param site  The exchange, of a known epoch.
  void check(const DeviceEndpoint& endpoint, const group::WaitSite& site, int64_t now_ns);
  void reset() { watch_.reset(); }

 private:
  group::WaitSite site_;
  std::optional<group::ArrivalWatch> watch_;  ///< of the first rank that has not come
};

/// One operation of one buffer whose kernels the host launches and whose rows it reads: its epoch,
/// and the steps every operation is made of. What is checked and said is what ops::Exchange checks
/// and says.
///
/// Made by run_operation() only, which aborts the communicator when the operation ends by an
/// exception after it took its epoch and before every rank knows the same end.
class DeviceExchange : public ops::BufferOperation {
 public:
  static constexpr bool kMayDefer = true;

  DeviceExchange(DeviceEndpoint& endpoint,
                 layout::Operation operation,
                 const group::InterruptCheck& interrupt_check);
  /// Goes on behind receive_later().
  DeviceExchange(DeviceEndpoint& endpoint,
                 ops::RemainingOperation left,
                 const group::InterruptCheck& interrupt_check);
  /// Goes on behind defer_agreement().
  DeviceExchange(DeviceEndpoint& endpoint,
                 RemainingRows left,
                 const group::InterruptCheck& interrupt_check);

  /// A window of this rank; peers that wait meanwhile allow for the time it takes to grow the heap.
  std::shared_ptr<Window> allocate(uint64_t bytes);

  /// Launches the exchange of rows.
  /// @param params  All but what belongs to the buffer, and to the host's reading.
  void publish(kernels::ExchangeParams params);

  /// Mailbox of its exchange and the host.
  const Mailbox& mailbox() const { return *mailbox_; }
  /// Waits until all operations before have been heard; what came of them, the next says.
  void await_former() const;

  /// Waits until the exchange has every active peer's row and reads them. Throws, on every rank
  /// alike, what some rank found wrong or where rows disagree; the epoch is then consumed and the
  /// buffer stays usable.
  ops::Rows collect(bool with_counts);

  /// Returns whether the caller, a stream, gets its results before the host has heard the rows of
  /// this operation, of which it needs nothing: then defer_agreement() takes the place of
  /// collect(). Not where a peer may say more of gradients, or may have to tell of the operation
  /// before.
  bool defers_agreement(const layout::OperationArguments& arguments);
  /// Leaves what the rows say to a later call. Null unless defers_agreement().
  std::shared_ptr<ops::DeferredJoin> defer_agreement(TakeCounts take_counts = nullptr);

  /// Hears what a DeferredAgreement is about.
  void finish_deferred();

  /// Refuses this operation where one before was wrong and this rank's caller has not been told:
  /// every rank hears so in place of this one, and calls stay matched: who knew is in this call by
  /// now.
  void report_deferred_error(const layout::OperationArguments& arguments);

  /// Second offers of @p short_ranks, in their order; @p own is this rank's where it is one of
  /// them.
  std::vector<layout::SecondOffer> exchange_offers(const kernels::Tables& tables,
                                                   const std::vector<int>& short_ranks,
                                                   const kernels::OwnOffer& own);

  /// Every rank knows that this operation ends here, and so did the kernel.
  /// @param status  what it has to have said.
  /// @param cause   what was found wrong, for operations that are refused because of it
  void settle(kernels::OperationStatus status, std::string cause = "");

  /// Everything launched: results are there for the caller when this returns (where it is the
  /// host), or once its stream comes to what it puts there from now on.
  /// @return on the progress thread of a caller that is a stream: what is to be joined first.
  std::shared_ptr<ops::DeferredJoin> finish();

  /// In place of finish(): ends when this rank's rows are sent, where the caller is the host, and
  /// leaves it to the phase to receive. @return what is to be joined.
  std::shared_ptr<ops::DeferredJoin> receive_later(const kernels::ReceiveParams& params);
  /// The rest, where the caller is the host. @return nanoseconds waited for every rank in it.
  std::vector<int64_t> receive(const kernels::ReceiveParams& params);

  /// Ends by an exception.
  void fail(const std::string& reason);

 private:
  /// Waits for what kernels do, answering signals and looking for whatever keeps them from it.
  void await(layout::Phase phase, const std::function<bool()>& is_ready);
  /// Waits for the exchange, which has all that it needs.
  void await_end_of_exchange() const;
  /// Waits for what was launched.
  void await_stream();
  void await_ticket(layout::Phase phase, uint64_t ticket);
  void look_around(layout::Phase phase, int64_t now_ns);
  /// Hears the operations before, which have come when this one has. What was found wrong there
  /// this rank's caller hears in place of that this one is refused for it.
  void hear_former();
  ops::Rows hear(bool with_counts);
  /// Error that every rank finds where one of them called this operation without having heard of an
  /// earlier one that it was found wrong, or null.
  std::exception_ptr find_refusal(const ops::Rows& rows) const;
  /// Learns it from the exchange where graphs took epochs before, once that has begun.
  bool knows_epoch();
  void check_closed();
  void stand_in_for(int peer_rank);
  void check_peers(layout::Phase phase, int64_t now_ns);
  /// Throws what made a kernel leave, if one did.
  void check_left();
  void exchange_rejection(const ops::RowMessage& row) override;

  DeviceEndpoint& endpoint_;
  uint64_t number_ = 0;
  const Mailbox* mailbox_ = nullptr;  ///< null behind receive_later(), which needs none
  uint64_t ticket_ = 0;
  bool has_launched_ = false;
  bool hears_later_ = false;
  bool is_eager_ = false;              ///< peers may refuse this operation
  std::exception_ptr deferred_error_;  ///< of an operation before
  TakeCounts take_counts_;
  group::GoneWatch gone_;
  RowArrivals arrivals_;
};

/// Publishes a row that says what is wrong on this rank in place of an operation, then throws it as
/// every rank does.
[[noreturn]] void reject_operation(DeviceEndpoint& endpoint,
                                   layout::Operation operation,
                                   layout::RowStatus status,
                                   const std::string& message,
                                   const group::InterruptCheck& interrupt_check);

/// Aborts and throws because a kernel that waited for a peer ran into the limit.
[[noreturn]] void give_up_timed_out(DeviceEndpoint& endpoint, const kernels::WaitReport& report);

}  // namespace moe::runtime
