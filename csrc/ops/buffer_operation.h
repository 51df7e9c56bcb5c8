#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/agreement.h"
#include "ops/buffer_base.h"

namespace moe::ops {

/// Across nodes, before anything else is looked at, so that every rank says the same.
/// @throws InvalidArgument  a rank has failed through which rows came to living ones of its node.
void check_rails(const group::Group& group, layout::Operation operation);

/// The first peer that takes no part in operation @p epoch, as it has destroyed its buffer; -1 for
/// none.
/// @param epoch  0 before the operation has one.
/// @param closed_epoch  See BufferOperation::check_closed().
template <typename ClosedEpoch>
int find_closed_peer(const group::Group& group, uint64_t epoch, ClosedEpoch&& closed_epoch) {
  for (int peer_rank = 0; peer_rank < group.num_ranks(); ++peer_rank) {
    if (peer_rank == group.rank_idx() || !group.is_active(peer_rank))
      continue;
    const uint64_t first_missed = closed_epoch(peer_rank);
    // News may be here before the rows of an operation that the peer still made.
    if (first_missed != 0 && (epoch == 0 || first_missed <= epoch))
      return peer_rank;
  }
  return -1;
}

/// An operation of which a part has ended well: what it goes on with.
struct RemainingOperation {
  layout::Operation operation = layout::Operation::kNone;
  uint64_t epoch = 0;
  bool is_epoch_known = true;
  layout::Phase step = layout::Phase::kData;
  std::vector<std::shared_ptr<Window>> offered;  ///< windows that peers may still touch
};

/// Common part of every operation of a buffer, on every engine: its epoch, its trace, and an end
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

  /// Says in this rank's row what is wrong here, then throws it as every rank does.
  [[noreturn]] void reject(const layout::OperationArguments& arguments,
                           layout::RowStatus status,
                           const std::string& message);
  [[noreturn]] void reject(const layout::OperationArguments& arguments, const CapacityError& error);
  /// The same where there is a @p problem with the arguments; "" for none.
  void reject_if(const std::string& problem, const layout::OperationArguments& arguments) {
    if (!problem.empty())
      reject(arguments, layout::RowStatus::kInvalidArgument, problem);
  }

  /// From now on time counts as @p phase in the trace.
  void enter(const char* phase);

 protected:
  /// @throws InvalidArgument  the buffer has been destroyed, or check_rails(). Throws what keeps
  /// the
  ///   communicator from being used.
  BufferOperation(BufferBase& buffer,
                  layout::Operation operation,
                  const group::InterruptCheck& interrupt_check);
  BufferOperation(BufferBase& buffer,
                  RemainingOperation left,
                  const group::InterruptCheck& interrupt_check);
  /// Ends this part. What is left belongs to the caller, who completes the epoch.
  RemainingOperation leave();
  virtual ~BufferOperation() = default;

  /// Publishes @p row, whose status is not kOk, and throws what the rows of all ranks say.
  virtual void exchange_rejection(const RowMessage& row) = 0;

  /// Ends the operation where a peer has destroyed the buffer and takes no part in it.
  /// @param closed_epoch  closed_epoch(rank): the first operation that the rank takes no part in, 0
  ///   for none.
  /// @param let_go  let_go(rank): what keeps waiting for a row of that rank ends.
  /// @throws InvalidArgument  names the peer.
  template <typename ClosedEpoch, typename LetGo>
  void check_closed(ClosedEpoch&& closed_epoch, LetGo&& let_go) {
    const int peer_rank = find_closed_peer(group_, epoch_, closed_epoch);
    if (peer_rank < 0)
      return;
    group_.check_abort();  // it may have destroyed the buffer because of that
    let_go(peer_rank);
    refuse_closed(peer_rank);
  }
  template <typename ClosedEpoch>
  void check_closed(ClosedEpoch&& closed_epoch) {
    check_closed(closed_epoch, [](int) {});
  }
  /// Takes the next epoch: from here on peers wait for this rank.
  /// @param is_epoch_known  Else it is some later one; see learn_epoch().
  void begin(bool is_epoch_known = true);
  /// It is @p epoch.
  void learn_epoch(uint64_t epoch);
  bool is_epoch_known() const { return is_epoch_known_; }
  /// Returns whether peers still wait for this rank's part.
  bool is_open() const { return is_open_; }
  /// Every rank knows the same end, and where this rank is.
  void close();
  /// Every rank ends here alike, without data: consumes the epoch.
  void consume();
  /// Ends by an exception: peers that wait for this rank, or read its memory, hear of it first.
  void give_up(const std::string& reason);
  /// Keeps aside what peers may still write to.
  void quarantine_offers();

  group::WaitSite site(layout::Phase phase) const;
  void record(int64_t start_ns, int64_t end_ns, int peer_rank);

  group::Group& group_;
  layout::Operation operation_;
  const group::InterruptCheck& interrupt_check_;
  uint64_t epoch_ = 0;
  layout::Phase step_ = layout::Phase::kRows;
  std::vector<std::shared_ptr<Window>> offered_;
  int64_t phase_start_ns_ = 0;

 private:
  [[noreturn]] void refuse_closed(int peer_rank);
  void flush_early_records();

  BufferBase& buffer_;
  bool is_open_ = true;
  bool is_epoch_known_ = true;
  std::vector<group::TraceRecord> early_records_;  ///< records from before the epoch was known
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

/// Runs @p body(exchange) as one operation of @p buffer; see run_to_end().
template <typename Exchange, typename Buffer, typename Body>
auto run_operation(Buffer& buffer,
                   layout::Operation operation,
                   const group::InterruptCheck& interrupt_check,
                   Body&& body) {
  const group::Group::OperationScope scope(buffer.group());
  Exchange exchange(buffer, operation, interrupt_check);
  return run_to_end(exchange, [&] { return body(exchange); });
}

/// Publishes a row that says what is wrong on this rank in place of an operation, then throws it as
/// every rank does.
/// @param prepare  Runs before that, within the operation.
template <typename Exchange, typename Buffer, typename Prepare>
[[noreturn]] void run_rejected(Buffer& buffer,
                               layout::Operation operation,
                               layout::RowStatus status,
                               const std::string& message,
                               const group::InterruptCheck& interrupt_check,
                               Prepare&& prepare) {
  run_operation<Exchange>(buffer, operation, interrupt_check, [&](Exchange& exchange) -> int {
    prepare();
    layout::OperationArguments arguments;
    arguments.operation = static_cast<int32_t>(operation);
    exchange.reject(arguments, status, message);
    return 0;
  });
  throw std::logic_error("a rejected operation ended well");
}
template <typename Exchange, typename Buffer>
[[noreturn]] void run_rejected(Buffer& buffer,
                               layout::Operation operation,
                               layout::RowStatus status,
                               const std::string& message,
                               const group::InterruptCheck& interrupt_check) {
  run_rejected<Exchange>(buffer, operation, status, message, interrupt_check, [] {});
}

}  // namespace moe::ops
