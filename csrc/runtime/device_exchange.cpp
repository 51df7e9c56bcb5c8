#include "runtime/device_exchange.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/rank_list.h"
#include "core/text.h"
#include "ops/dispatch_rules.h"
#include "runtime/deferred_agreement.h"
#include "runtime/receive_phase.h"

namespace moe::runtime {

using kernels::ExchangeParams;
using kernels::OperationStatus;
using layout::Phase;
using layout::Row;
using layout::RowStatus;

DeviceExchange::DeviceExchange(DeviceEndpoint& endpoint,
                               layout::Operation operation,
                               const group::InterruptCheck& interrupt_check)
    : BufferOperation(endpoint, operation, interrupt_check), endpoint_(endpoint) {
  endpoint_.open_receive().settle(interrupt_check);
  OperationRing& operations = endpoint_.operations();
  number_ = operations.take_number();
  // Else all before it are heard first, as the memory of this one may be none but theirs: without
  // windows for low-latency rows all is of the heap, and behind graphs or across nodes what follows
  // needs to know what came before.
  const bool runs_ahead = endpoint_.buffer_memory().window_bytes() > 0 && !endpoint_.has_graphs() &&
                          endpoint_.launcher().internode() == nullptr;
  deferred_error_ = operations.take_heard(number_, runs_ahead, interrupt_check);
  // Work of the progress thread is behind what was called before it; see CallOrder.
  if (!endpoint_.is_on_progress_thread())
    if (const auto verdict = DeferredAgreement::of_another(endpoint_, *endpoint_.order().caller()))
      verdict->hear_for(endpoint_, interrupt_check);
  is_eager_ = operations.take_eager_once();
  group_.check_abort();
  // An operation that the host did not wait for may have left since.
  check_left();
  check_closed();
  // Waits of kernels of graphs, and of operations that ended otherwise, are not this one's.
  if (endpoint_.is_host_caller())
    endpoint_.control().take_waited_ns();
  mailbox_ = &operations.take_mailbox(number_);
  begin(!endpoint_.has_graphs());
}

bool DeviceExchange::knows_epoch() {
  if (is_epoch_known())
    return true;
  // Behind graphs whose runs nobody counts. Until the exchange begins no peer can keep it waiting.
  if (const uint64_t epoch = mailbox_->epoch(); epoch != 0)
    learn_epoch(epoch);
  return is_epoch_known();
}

DeviceExchange::DeviceExchange(DeviceEndpoint& endpoint,
                               ops::RemainingOperation left,
                               const group::InterruptCheck& interrupt_check)
    : BufferOperation(endpoint, std::move(left), interrupt_check),
      endpoint_(endpoint),
      has_launched_(true) {}

std::shared_ptr<Window> DeviceExchange::allocate(uint64_t bytes) {
  // Rather than that the heap grows: what operations before have given back is free once they end.
  do {
    if (auto window = endpoint_.memory().allocate_free(bytes); window && window->bytes() >= bytes)
      return window;
  } while (endpoint_.operations().await_next(interrupt_check_));
  endpoint_.control().show_phase(Phase::kGrowing);
  try {
    auto window = endpoint_.memory().allocate(bytes);
    endpoint_.segments().refresh();
    endpoint_.control().show_phase(Phase::kIdle);
    return window;
  } catch (...) {
    endpoint_.control().show_phase(Phase::kIdle);
    throw;
  }
}

void DeviceExchange::publish(ExchangeParams params) {
  endpoint_.segments().refresh();
  params.buffer = endpoint_.control().buffer();
  params.heard_epoch = endpoint_.operations().heard_epoch();
  params.host_read = mailbox_->header();
  params.ticket = ticket_ = endpoint_.operations().take_ticket();
  has_launched_ = true;
  endpoint_.launcher().exchange(params);
}

const uint8_t* DeviceExchange::upload_ranks(const std::vector<uint8_t>& values) const {
  uint8_t* const copy = endpoint_.control().rank_values();
  endpoint_.order().stream()->copy(
      copy, mailbox_->write_ranks(values), static_cast<int64_t>(values.size()));
  return copy;
}

bool DeviceExchange::defers_agreement(const layout::OperationArguments& arguments) {
  hears_later_ = !endpoint_.is_host_caller() && !endpoint_.device().is_shared() &&
                 !endpoint_.is_on_progress_thread() && !is_eager_ &&
                 layout::GradientWord::is_final(arguments.gradients, arguments.all_needs());
  return hears_later_;
}

std::shared_ptr<ops::DeferredJoin> DeviceExchange::defer_agreement(TakeCounts take_counts) {
  if (!hears_later_)
    return nullptr;
  step_ = Phase::kRows;
  // The next operations may take windows of the buffer again, in the order of the stream.
  for (auto& window : offered_)
    window = WindowRing::memory_of(std::move(window));
  OperationRing& operations = endpoint_.operations();
  const uint64_t first_epoch = is_epoch_known() ? epoch_ : 0;
  auto hear = [&endpoint = endpoint_,
               mailbox = mailbox_,
               ticket = ticket_,
               left = leave(),
               counts = std::move(take_counts)](const group::InterruptCheck& check) mutable {
    const group::Group::OperationScope scope(endpoint.group());
    DeviceExchange exchange(endpoint, std::move(left), check);
    exchange.mailbox_ = mailbox;
    exchange.ticket_ = ticket;
    ops::run_to_end(exchange, [&exchange, counts = std::move(counts)] {
      exchange.finish_deferred(counts);
      return true;
    });
  };
  const auto verdict = DeferredAgreement::make({endpoint_,
                                                endpoint_.device(),
                                                endpoint_.control(),
                                                operations.newest(),
                                                operation_,
                                                number_,
                                                first_epoch,
                                                mailbox_,
                                                ticket_,
                                                std::move(hear)},
                                               *endpoint_.order().caller());
  operations.push(verdict);
  return verdict;
}

void DeviceExchange::await_former() const {
  while (endpoint_.operations().await_next(interrupt_check_)) {
  }
}

void DeviceExchange::finish_deferred(const TakeCounts& take_counts) {
  // A row that stands for that of such a peer says nothing.
  if (knows_epoch())
    check_closed();
  ops::Rows rows = hear(take_counts != nullptr);
  if (take_counts == nullptr)
    return;
  if (const std::exception_ptr error = take_counts(std::move(rows), epoch_)) {
    settle(OperationStatus::kOverflow, error_text(error));
    std::rethrow_exception(error);
  }
}

void DeviceExchange::report_deferred_error(const layout::OperationArguments& arguments) {
  if (deferred_error_ == nullptr)
    return;
  reject(arguments,
         RowStatus::kInvalidArgument,
         concat("refuses this ",
                layout::operation_name(operation_),
                ", as an operation before it was found wrong: ",
                error_text(deferred_error_)));
}

ops::Rows DeviceExchange::collect(bool with_counts) {
  hear_former();
  return hear(with_counts);
}

void DeviceExchange::hear_former() {
  if (endpoint_.operations().is_empty())
    return;
  const std::exception_ptr error = endpoint_.operations().take_all(interrupt_check_);
  if (deferred_error_ == nullptr)
    deferred_error_ = error;
  group_.show_presence(endpoint_.buffer_number(), epoch_, operation_);
}

ops::Rows DeviceExchange::hear(bool with_counts) {
  await_ticket(Phase::kRows, ticket_);
  knows_epoch();
  const int num_ranks = group_.num_ranks();
  ops::Rows rows;
  rows.headers.resize(static_cast<size_t>(num_ranks));
  rows.problems.resize(static_cast<size_t>(num_ranks));
  for (int peer_rank = 0; peer_rank < num_ranks; ++peer_rank) {
    if (!group_.is_active(peer_rank))
      continue;
    const Row& row = mailbox_->row(peer_rank);
    rows.headers[static_cast<size_t>(peer_rank)] = row;
    ops::RankProblem& problem = rows.problems[static_cast<size_t>(peer_rank)];
    switch (static_cast<RowStatus>(row.status)) {
      case RowStatus::kOk:
        break;
      case RowStatus::kBadExpert: {
        // The message of a row whose ids a device has yet to check is its number of choices, and of
        // ids that there are.
        char* rest = nullptr;
        const int64_t num_topk = std::strtoll(row.message(), &rest, 10);
        problem = {RowStatus::kInvalidArgument,
                   layout::describe_bad_expert(static_cast<int64_t>(row.needed_bytes),
                                               num_topk,
                                               static_cast<int64_t>(row.available_bytes),
                                               std::strtoll(rest, nullptr, 10))};
        break;
      }
      case RowStatus::kFailedRank:
        problem = {RowStatus::kInvalidArgument,
                   ops::describe_failed_rank(static_cast<int64_t>(row.needed_bytes),
                                             static_cast<int>(row.available_bytes))};
        break;
      default:
        problem = {static_cast<RowStatus>(row.status),
                   row.message(),
                   row.needed_bytes,
                   row.available_bytes};
    }
  }
  const std::exception_ptr refusal = find_refusal(rows);
  if (const auto error = refusal ? refusal : ops::find_disagreement(rows, group_)) {
    settle(OperationStatus::kRejected,
           refusal ? endpoint_.operations().last_refused().text : error_text(error));
    // Errors that the caller has not been told come first.
    std::rethrow_exception(deferred_error_ ? deferred_error_ : error);
  }
  if (mailbox_->status() == OperationStatus::kRejected || deferred_error_ != nullptr)
    throw std::logic_error(
        concat("kernels of epoch ", epoch_, " were to refuse what the host finds right"));
  step_ = Phase::kData;
  if (with_counts) {
    rows.counts = layout::CountMatrix(num_ranks, endpoint_.config().num_experts);
    for (int peer_rank = 0; peer_rank < num_ranks; ++peer_rank)
      if (group_.is_active(peer_rank))
        std::copy_n(
            mailbox_->row(peer_rank).counts(), rows.counts.stride(), rows.counts.row(peer_rank));
  }
  return rows;
}

std::exception_ptr DeviceExchange::find_refusal(const ops::Rows& rows) const {
  const RefusedOperation& refused = endpoint_.operations().last_refused();
  std::vector<int> unaware_ranks;
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    if (!group_.is_active(peer_rank))
      continue;
    const Row& row = rows.headers[static_cast<size_t>(peer_rank)];
    if (row.status != static_cast<int32_t>(RowStatus::kOk))
      return nullptr;
    if (row.heard_epoch() < refused.epoch)
      unaware_ranks.push_back(peer_rank);
  }
  if (unaware_ranks.empty())
    return nullptr;
  return std::make_exception_ptr(
      InvalidArgument(concat(layout::operation_name(operation_),
                             " of epoch ",
                             epoch_,
                             " is refused on every rank, as ",
                             rank_list(unaware_ranks),
                             " called it before hearing that an operation before it was found "
                             "wrong: ",
                             refused.text)));
}

void DeviceExchange::exchange_rejection(const ops::RowMessage& row) {
  ExchangeParams params;
  params.tables = endpoint_.control().tables();
  params.arguments = row.arguments;
  params.status = static_cast<int32_t>(row.status);
  params.needed_bytes = row.needed_bytes;
  params.available_bytes = row.available_bytes;
  params.message = mailbox_->write_message(row.message);
  publish(params);
  try {
    collect(false);
  } catch (...) {
    if (deferred_error_ != nullptr && !group_.is_aborted())
      std::rethrow_exception(deferred_error_);
    throw;
  }
}

std::vector<layout::SecondOffer> DeviceExchange::exchange_offers(
    const kernels::Tables& tables,
    const std::vector<int>& short_ranks,
    const kernels::OwnOffer& own) {
  endpoint_.segments().refresh();
  kernels::OffersParams params;
  params.buffer = endpoint_.control().buffer();
  params.tables = tables;
  params.own = own;
  const std::vector<uint8_t> is_short = rank_flags(short_ranks, group_.num_ranks());
  params.is_short = is_short[static_cast<size_t>(group_.rank_idx())];
  params.short_ranks = upload_ranks(is_short);
  params.host_read = mailbox_->header();
  params.ticket = ticket_ = endpoint_.operations().take_ticket();
  step_ = Phase::kOffers;
  endpoint_.launcher().offers(params);
  await_ticket(Phase::kOffers, ticket_);
  step_ = Phase::kData;
  std::vector<layout::SecondOffer> seconds;
  for (const int rank_idx : short_ranks)
    seconds.push_back(mailbox_->second_offer(rank_idx));
  return seconds;
}

void DeviceExchange::settle(OperationStatus status, std::string cause) {
  endpoint_.operations().force_eager_once();
  if (status != OperationStatus::kShort)
    endpoint_.operations().note_refused({epoch_, std::move(cause)});
  if (mailbox_->status() != status)
    throw std::logic_error(concat("the exchange of epoch ",
                                  epoch_,
                                  " ended with status ",
                                  static_cast<int32_t>(mailbox_->status()),
                                  ", the host finds ",
                                  static_cast<int32_t>(status)));
  consume();
}

std::shared_ptr<ops::DeferredJoin> DeviceExchange::finish() {
  if (!endpoint_.is_host_caller()) {
    CallOrder& order = endpoint_.order();
    auto end = order.leave_running();
    // Work that the caller puts into its stream until it asks for the results runs beside the rows.
    if (endpoint_.is_on_progress_thread())
      return CallOrder::join(order.caller(), std::move(end));
    order.caller()->wait(*end);
    return nullptr;
  }
  await_stream();
  return nullptr;
}

void DeviceExchange::await_stream() {
  const auto event = endpoint_.order().stream()->record();
  await(Phase::kData, [&event] { return event->is_complete(); });
  check_left();
  // Bytes read from a peer count only if that peer had not given up by then: it may have
  // overwritten its rows since.
  std::atomic_thread_fence(std::memory_order_acquire);
  group_.check_abort();
}

std::shared_ptr<ops::DeferredJoin> DeviceExchange::receive_later(
    const kernels::ReceiveParams& params) {
  std::shared_ptr<ReceivePhase> phase;
  if (endpoint_.is_host_caller()) {
    await_stream();  // the caller's inputs are read until then
    phase =
        ReceivePhase::of_host(endpoint_, [&endpoint = endpoint_, params, left = leave()]() mutable {
          const group::InterruptCheck nothing;
          const group::Group::OperationScope scope(endpoint.group());
          DeviceExchange exchange(endpoint, std::move(left), nothing);
          return ops::run_to_end(exchange, [&] {
            endpoint.launcher().receive(params);
            exchange.await_stream();
            exchange.withdraw_offers();
            return endpoint.control().take_waited_ns();
          });
        });
  } else {
    endpoint_.order().leave_running();
    phase = ReceivePhase::of_stream(
        endpoint_,
        endpoint_.order(),
        [&launcher = endpoint_.launcher(), params] { launcher.receive(params); },
        leave());
  }
  return endpoint_.open_receive().open(std::move(phase));
}

void DeviceExchange::fail(const std::string& reason) {
  try {
    endpoint_.order().go_before_graphs();
  } catch (...) {
    // The device has failed: nothing runs on it any more.
  }
  if (!is_open())
    return;
  knows_epoch();
  give_up(reason);
  // Kernels leave by the abort; until then they read what the caller gave.
  endpoint_.order().drain();
  quarantine_offers();
}

void reject_operation(DeviceEndpoint& endpoint,
                      layout::Operation operation,
                      RowStatus status,
                      const std::string& message,
                      const group::InterruptCheck& interrupt_check) {
  const auto active = endpoint.device().activate_for_now();
  // Peers hear of nothing while a graph is recorded.
  if (endpoint.is_capturing()) {
    if (status == RowStatus::kInvalidType)
      throw InvalidType(message);
    throw InvalidArgument(message);
  }
  ops::run_rejected<DeviceExchange>(endpoint, operation, status, message, interrupt_check, [&] {
    endpoint.order().wait_for_caller();  // epochs are taken in the order of the calls
  });
}

}  // namespace moe::runtime
