#include "runtime/device_dispatch.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/rank_list.h"
#include "core/text.h"
#include "ops/dispatch_steps.h"
#include "runtime/captured.h"
#include "runtime/device_engine.h"
#include "runtime/dispatch_launches.h"

namespace moe::runtime {

namespace {

using kernels::ExchangeParams;
using kernels::OperationStatus;

/// One dispatch whose rows kernels move.
class DeviceDispatch : public ops::DispatchSteps<DeviceEngine, DeviceDispatch> {
 public:
  DeviceDispatch(DeviceEndpoint& endpoint,
                 const ops::DispatchParams& params,
                 DeviceExchange& exchange)
      : DispatchSteps(endpoint, params, exchange),
        launches_(endpoint, params, arrangement_, Contents::kUnset) {}

 private:
  friend DispatchSteps;

  void begin() {
    endpoint_.order().wait_for_caller(params_.caller_mark.get());
    exchange_.report_deferred_error(arguments());
    // Sizes of a cached dispatch follow from counts, and windows of the heap are not to be as many
    // as operations may be in flight.
    const bool is_of_heap = params_.window && !WindowRing::owns(*params_.window);
    if (params_.plan ? params_.plan->awaits_counts() : is_of_heap)
      exchange_.await_former();
    if (params_.plan)
      reject_if(find_failure(*params_.plan));
  }

  void count_choices() {
    try {
      launches_.take_sets();
    } catch (const CapacityError& error) {
      exchange_.reject(arguments(), error);
    }
    launches_.make_plan([this](int64_t bytes) { return endpoint_.buffer_memory().scratch(bytes); });
    reject_if(launches_.find_shortage());
  }

  void take_plan() {
    launches_.take_plan(*plan_);
    reject_if(launches_.find_shortage());
  }

  void publish(const Offer& offer) {
    ExchangeParams row = launches_.row();
    row.offer = offer;
    if (plan_ != nullptr) {
      exchange_.publish(row);
      launch_rows();  // every size is known
      return;
    }
    // Numbers of this rank for the text about a bad id.
    row.message = exchange_.mailbox().write_message(concat(
        params_.num_topk, ' ', layout::num_ids(params_.replicas.get(), endpoint_.placement())));
    if (is_low_latency() && !params_.masked_ranks.empty())
      row.is_masked = exchange_.upload_ranks(rank_flags(params_.masked_ranks, num_ranks_));
    exchange_.publish(row);
    // Rows follow their counts while the host reads those. No count decides the size of a
    // low-latency window, so nobody is short; elsewhere hardly anybody is where this rank has a
    // window of the size it needed before, and if somebody is, the kernel returns at once.
    if (is_low_latency())
      launch_rows();
    else
      send_rows_ahead();
  }

  void send_rows_ahead() {
    // Across nodes the kernel takes part in what follows the offers, too.
    if (window_ == nullptr || endpoint_.launcher().internode() != nullptr)
      return;
    launches_.send_rows();
    are_rows_sent_ = true;
  }

  /// Counts as the kernel has found, and left in the rows of those that are there.
  void count_tokens(ops::Rows* rows) {
    const int num_experts = endpoint_.config().num_experts;
    for (int src_rank = 0; src_rank < num_ranks_; ++src_rank)
      if (endpoint_.group().is_active(src_rank))
        for (int dst_rank = 0; dst_rank < num_ranks_; ++dst_rank)
          rows->counts.row(src_rank)[num_experts + dst_rank] = std::max(
              exchange_.mailbox().row(src_rank).counts()[num_experts + dst_rank], int32_t{0});
  }

  std::shared_ptr<const DevicePlan> make_plan(ops::JudgedCounts judged) {
    const std::shared_ptr<DevicePlan>& plan = launches_.made_plan();
    static_cast<ops::PlanHeader&>(*plan) = ops::PlanHeader::make(arrangement_,
                                                                 std::move(judged.kept),
                                                                 std::move(judged.asked),
                                                                 endpoint_.placement(),
                                                                 endpoint_.rank_idx(),
                                                                 params_.num_tokens,
                                                                 params_.num_topk);
    if (is_low_latency())
      plan->hash = ops::PlanHeader::hash_of_epoch(exchange_.epoch());
    return plan;
  }

  std::shared_ptr<const DevicePlan> defer_counts() {
    launches_.foresee_plan();
    launches_.made_plan()->hash = ops::PlanHeader::hash_of_epoch(exchange_.epoch());
    are_counts_late_ = true;
    take_counts_ = [plan = launches_.made_plan(),
                    &endpoint = endpoint_,
                    arrangement = arrangement_,
                    capacity = params_.capacity(),
                    replicas = params_.replicas,
                    row_bytes = params_.row_bytes](ops::Rows rows, uint64_t epoch) {
      if (replicas != nullptr)
        layout::share_rows(*replicas, endpoint.placement(), &rows.counts);
      ops::JudgedCounts judged =
          ops::judge_counts(std::move(rows.counts), endpoint, arrangement, capacity, row_bytes);
      if (judged.overflow)
        return judged.overflow;
      auto counted = ops::PlanHeader::make(arrangement,
                                           std::move(judged.kept),
                                           std::move(judged.asked),
                                           endpoint.placement(),
                                           endpoint.rank_idx(),
                                           plan->num_tokens,
                                           plan->num_topk);
      counted.hash = ops::PlanHeader::hash_of_epoch(epoch);
      plan->take_counts(std::move(counted));
      return std::exception_ptr();
    };
    return launches_.made_plan();
  }

  std::vector<layout::SecondOffer> exchange_offers(const std::vector<int>& short_ranks,
                                                   const std::optional<layout::SecondOffer>& own) {
    are_rows_sent_ = false;
    kernels::OwnOffer said;
    if (own)
      said = {own->offer, own->needed_bytes, own->available_bytes};
    return exchange_.exchange_offers(launches_.tables().tables, short_ranks, said);
  }

  // The kernel has found the same.
  void settle_overflow(const std::exception_ptr& error) {
    exchange_.settle(OperationStatus::kOverflow, error_text(error));
  }
  void settle_shortage() { exchange_.settle(OperationStatus::kShort); }

  void move(const ops::Rows& /*rows*/) {
    if (!is_moving_)
      launch_rows();
  }

  void launch_rows() {
    exchange_.enter("data");
    if (!are_rows_sent_)
      launches_.send_rows();
    is_copied_out_ = !is_low_latency() &&
                     ops::is_copied_out(endpoint_, needed(endpoint_.rank_idx()), params_.copy_out);
    // Rows that are copied out have to be whole.
    receives_later_ = params_.is_async && !is_copied_out_ && !endpoint_.has_graphs();
    if (!receives_later_)
      endpoint_.launcher().receive(launches_.receive_params(), true);
    is_moving_ = true;
  }

  ops::DispatchOutcome outcome() {
    const int own_rank = endpoint_.rank_idx();
    if (!window_)
      window_ = endpoint_.memory().allocate(0);
    const auto copy_out = is_copied_out_ ? ops::CopyOut::kAlways : ops::CopyOut::kNever;
    auto owner = copy_out_window(endpoint_, window_, needed(own_rank), copy_out, &outcome_.rows);
    if (receives_later_) {
      outcome_.end = exchange_.receive_later(launches_.receive_params());
    } else {
      exchange_.enter("done");
      outcome_.end = exchange_.finish();
      outcome_.verdict = exchange_.defer_agreement(std::move(take_counts_));
      if (are_counts_late_)
        launches_.made_plan()->verdict = outcome_.verdict;
    }
    exchange_.withdraw_offers();
    if (!is_low_latency())
      window_->shrink(needed(own_rank));
    outcome_.owner = std::move(owner);
    outcome_.plan = plan_;
    outcome_.waited_ns = endpoint_.control().take_waited_ns();
    ops::point_into_window(params_, arrangement_, own_layout(), &outcome_);
    const DispatchTables& tables = launches_.tables();
    outcome_.expert_offsets = std::shared_ptr<void>(tables.memory, tables.tables.expert_offsets);
    return std::move(outcome_);
  }

  DispatchLaunches launches_;
  TakeCounts take_counts_;      ///< function that takes counts, if they come later
  bool are_rows_sent_ = false;  ///< unless the exchange has found that rows may not move
  bool is_moving_ = false;
  bool are_counts_late_ = false;  ///< the plan's, which come behind the verdict
  bool is_copied_out_ = false;
  bool receives_later_ = false;
};

}  // namespace

std::shared_ptr<void> copy_out_window(DeviceEndpoint& endpoint,
                                      std::shared_ptr<Window> window,
                                      uint64_t bytes,
                                      ops::CopyOut mode,
                                      std::byte** data) {
  if (!ops::is_copied_out(endpoint, bytes, mode)) {
    *data = window->data();
    return window;
  }
  auto copy = endpoint.device().allocate_unset(static_cast<int64_t>(bytes));
  endpoint.order().stream()->copy(copy.get(), window->data(), static_cast<int64_t>(bytes));
  *data = copy.get();
  return copy;
}

ops::DispatchOutcome dispatch(DeviceEndpoint& endpoint,
                              const ops::DispatchParams& params,
                              const group::InterruptCheck& interrupt_check) {
  const auto active = endpoint.device().activate_for_now();
  if (params.is_captured ? *params.is_captured : endpoint.is_capturing())
    return capture_dispatch(endpoint, params);
  if (params.plan)
    check_has_counts(static_cast<const DevicePlan&>(*params.plan));
  const auto operation =
      params.plan ? layout::Operation::kCachedDispatch : layout::Operation::kDispatch;
  return ops::run_operation<DeviceExchange>(
      endpoint, operation, interrupt_check, [&](DeviceExchange& exchange) {
        return DeviceDispatch(endpoint, params, exchange).run();
      });
}

}  // namespace moe::runtime
