#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/agreement.h"
#include "kernels/exchange.h"
#include "runtime/device_endpoint.h"

namespace moe::runtime {

/// One operation of one buffer whose kernels the host launches and whose rows it reads: its epoch,
/// and the steps every operation is made of. What is checked and said is what host::Exchange checks
/// and says.
///
/// Made by run_operation() only, which aborts the communicator when the operation ends by an
/// exception after it took its epoch and before every rank knows the same end.
class DeviceExchange {
 public:
  DeviceExchange(DeviceEndpoint& endpoint,
                 layout::Operation operation,
                 const host::InterruptCheck& interrupt_check);

  uint64_t epoch() const { return epoch_; }

  /// A window of this rank; peers that wait meanwhile allow for the time it takes to grow the heap.
  std::shared_ptr<Window> allocate(uint64_t bytes);

  /// Windows that peers may write to in this operation; kept aside if it is aborted.
  void offer(std::shared_ptr<Window> window) { offered_.push_back(std::move(window)); }

  /// No peer writes to the offered windows any more.
  void withdraw_offers() { offered_.clear(); }

  /// Launches the exchange of rows.
  /// @param params  All but what belongs to the buffer, and to the host's reading.
  void publish(kernels::ExchangeParams params);

  /// Waits until the exchange has every active peer's row and reads them. Throws, on every rank
  /// alike, what some rank found wrong or where rows disagree; the epoch is then consumed and the
  /// buffer stays usable.
  host::Rows collect(bool with_counts);

  /// Publishes a row that says what is wrong here, then throws it as every rank does.
  [[noreturn]] void reject(const layout::OperationArguments& arguments,
                           layout::RowStatus status,
                           const std::string& message);
  [[noreturn]] void reject(const layout::OperationArguments& arguments, const CapacityError& error);

  /// Second offers of @p short_ranks, in their order; @p own is this rank's where it is one of
  /// them.
  std::vector<layout::SecondOffer> exchange_offers(const kernels::Tables& tables,
                                                   const std::vector<int>& short_ranks,
                                                   const kernels::OwnOffer& own);

  /// Every rank knows that this operation ends here, and so did the kernel.
  /// @param status  what it has to have said.
  void settle(kernels::OperationStatus status);

  /// Everything launched: results are there for the caller when this returns (where it is the
  /// host), or once its stream comes to what it puts there from now on.
  void finish();

  /// All of this rank's part has ended, or will have in the order of the stream.
  void complete();

  /// Ends by an exception.
  void fail(const std::string& reason);

  /// From now on time counts as @p phase in the trace.
  void enter(const char* phase);

 private:
  enum class State { kEntered, kEnded };

  host::WaitSite site(layout::Phase phase) const;
  /// Waits for what kernels do, answering signals and looking for whatever keeps them from it.
  void await(layout::Phase phase, const std::function<bool()>& is_ready);
  void await_ticket(layout::Phase phase, uint64_t ticket);
  void look_around(layout::Phase phase, int64_t now_ns);
  void check_closed();
  void stand_in_for(int peer_rank);
  void check_peers(layout::Phase phase, int64_t now_ns);
  void check_arrivals(int64_t now_ns);
  /// Throws what made a kernel leave, if one did.
  void check_left();
  [[noreturn]] void publish_rejection(const layout::OperationArguments& arguments,
                                      layout::RowStatus status,
                                      const std::string& message,
                                      uint64_t needed_bytes,
                                      uint64_t available_bytes);

  DeviceEndpoint& endpoint_;
  host::Group& group_;
  layout::Operation operation_;
  const host::InterruptCheck& interrupt_check_;
  uint64_t epoch_ = 0;
  uint64_t ticket_ = 0;
  State state_ = State::kEntered;
  bool has_launched_ = false;
  layout::Phase step_ = layout::Phase::kRows;
  std::vector<std::shared_ptr<Window>> offered_;
  int64_t start_ns_ = 0;
  int64_t warned_ns_ = 0;
  int64_t death_ns_ = 0;
  const char* phase_ = "prepare";
  int64_t phase_start_ns_ = 0;
};

/// Publishes a row that says what is wrong on this rank in place of an operation, then throws it as
/// every rank does.
[[noreturn]] void reject_operation(DeviceEndpoint& endpoint,
                                   layout::Operation operation,
                                   layout::RowStatus status,
                                   const std::string& message,
                                   const host::InterruptCheck& interrupt_check);

/// Aborts and throws because a kernel that waited for a peer ran into the limit.
[[noreturn]] void give_up_timed_out(DeviceEndpoint& endpoint, const kernels::WaitReport& report);

/// Runs @p body(exchange) as one operation of @p endpoint.
template <typename Body>
auto run_operation(DeviceEndpoint& endpoint,
                   layout::Operation operation,
                   const host::InterruptCheck& interrupt_check,
                   Body&& body) {
  const host::Group::OperationScope scope(endpoint.group());
  DeviceExchange exchange(endpoint, operation, interrupt_check);
  try {
    auto outcome = body(exchange);
    exchange.complete();
    return outcome;
  } catch (const std::exception& error) {
    exchange.fail(error.what());
    throw;
  } catch (...) {
    exchange.fail("an exception without a message");
    throw;
  }
}

}  // namespace moe::runtime
