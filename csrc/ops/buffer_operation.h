#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/endpoint_base.h"

namespace moe::host {

/// Across nodes, before anything else is looked at, so that every rank says the same.
/// @throws InvalidArgument  a rank has failed through which rows came to living ones of its node.
void check_rails(const Group& group, layout::Operation operation);

/// What every operation of a buffer has, whoever moves its rows: its epoch, its trace, and an end
/// that every rank hears of.
class BufferOperation {
 public:
  BufferOperation(const BufferOperation&) = delete;
  BufferOperation& operator=(const BufferOperation&) = delete;

  uint64_t epoch() const { return epoch_; }

  /// Windows that peers may touch in this operation; kept until it is aborted, and then aside.
  void offer(std::shared_ptr<Window> window) { offered_.push_back(std::move(window)); }

  /// No peer writes to the offered windows any more.
  void withdraw_offers() { offered_.clear(); }

  /// All of this rank's part has ended, or will have in the order of its stream.
  void complete();

  /// From now on time counts as @p phase in the trace.
  void enter(const char* phase);

 protected:
  /// @throws InvalidArgument  the buffer has been destroyed, or check_rails(). Throws what keeps
  /// the
  ///   communicator from being used.
  BufferOperation(EndpointBase& endpoint,
                  layout::Operation operation,
                  const InterruptCheck& interrupt_check);
  /// Goes on with an operation of which a part has ended well.
  /// @param offered  What peers may still touch.
  BufferOperation(EndpointBase& endpoint,
                  layout::Operation operation,
                  uint64_t epoch,
                  std::vector<std::shared_ptr<Window>> offered,
                  const InterruptCheck& interrupt_check);
  ~BufferOperation() = default;

  /// @throws InvalidArgument  always: @p peer_rank has destroyed the buffer.
  [[noreturn]] void refuse_closed(int peer_rank) const;
  /// Takes the next epoch: from here on peers wait for this rank.
  /// @param is_epoch_known  Else it is some later one; see learn_epoch().
  void begin(bool is_epoch_known = true);
  /// It is @p epoch.
  void learn_epoch(uint64_t epoch);
  bool is_epoch_known() const { return is_epoch_known_; }
  /// Whether peers still wait for this rank's part.
  bool is_open() const { return is_open_; }
  /// Every rank knows the same end, and where this rank is.
  void close();
  /// Ends by an exception: whoever waits for this rank, or reads its memory, hears of it first.
  void give_up(const std::string& reason);
  /// Keeps aside what peers may still write to.
  void quarantine_offers();

  WaitSite site(layout::Phase phase) const;
  void record(int64_t start_ns, int64_t end_ns, int peer_rank);

  Group& group_;
  layout::Operation operation_;
  const InterruptCheck& interrupt_check_;
  uint64_t epoch_ = 0;
  layout::Phase step_ = layout::Phase::kRows;
  std::vector<std::shared_ptr<Window>> offered_;
  int64_t phase_start_ns_ = 0;

 private:
  void flush_early_records();

  EndpointBase& buffer_;
  bool is_open_ = true;
  bool is_epoch_known_ = true;
  std::vector<TraceRecord> early_records_;  ///< of before the epoch was known
  const char* phase_ = "prepare";
};

/// Runs @p body() as the last part of @p exchange. Where it throws after the epoch was taken and
/// before every rank knows the same end, the communicator is aborted.
template <typename Exchange, typename Body>
auto run_to_end(Exchange& exchange, Body&& body) {
  try {
    auto outcome = body();
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

/// Runs @p body(exchange) as one operation of @p endpoint; see run_to_end().
template <typename Exchange, typename Endpoint, typename Body>
auto run_operation(Endpoint& endpoint,
                   layout::Operation operation,
                   const InterruptCheck& interrupt_check,
                   Body&& body) {
  const Group::OperationScope scope(endpoint.group());
  Exchange exchange(endpoint, operation, interrupt_check);
  return run_to_end(exchange, [&] { return body(exchange); });
}

}  // namespace moe::host
