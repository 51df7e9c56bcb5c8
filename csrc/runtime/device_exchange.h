#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/peer_wait.h"
#include "kernels/exchange.h"
#include "ops/agreement.h"
#include "ops/buffer_operation.h"
#include "runtime/absent_peers.h"
#include "runtime/device_endpoint.h"

namespace moe::runtime {

/// Takes the count matrix of rows that agree, of an epoch. @return the error that every rank finds
/// in it, or null.
using TakeCounts = std::function<std::exception_ptr(ops::Rows, uint64_t)>;

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

  /// A window of this rank; peers that wait meanwhile allow for the time it takes to grow the heap.
  std::shared_ptr<Window> allocate(uint64_t bytes);

  /// Launches the exchange of rows.
  /// @param params  All but what belongs to the buffer, and to the host's reading.
  void publish(kernels::ExchangeParams params);

  /// Mailbox of its exchange and the host.
  const Mailbox& mailbox() const { return *mailbox_; }
  /// Device copy of a value per rank, in the order of the stream; valid until the next call.
  const uint8_t* upload_ranks(const std::vector<uint8_t>& values) const;
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
  /// @param status  status that it has to have said.
  /// @param cause   text of what was found wrong, for operations that are refused because of it
  void settle(kernels::OperationStatus status, std::string cause = "");

  /// Everything launched: results are there for the caller when this returns (where it is the
  /// host), or once its stream comes to what it puts there from now on.
  /// @return on the progress thread of a caller that is a stream: what is to be joined first.
  std::shared_ptr<ops::DeferredJoin> finish();

  /// In place of finish(): ends when this rank's rows are sent, where the caller is the host, and
  /// leaves it to the phase to receive. @return the end that is to be joined.
  std::shared_ptr<ops::DeferredJoin> receive_later(const kernels::ReceiveParams& params);

  /// Ends by an exception.
  void fail(const std::string& reason);

 private:
  /// Goes on behind leave().
  DeviceExchange(DeviceEndpoint& endpoint,
                 ops::RemainingOperation left,
                 const group::InterruptCheck& interrupt_check);

  /// Hears what a DeferredAgreement is about.
  /// @param take_counts  None where rows come without counts.
  void finish_deferred(const TakeCounts& take_counts);

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
  std::exception_ptr deferred_error_;  ///< error of an operation before
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

}  // namespace moe::runtime
