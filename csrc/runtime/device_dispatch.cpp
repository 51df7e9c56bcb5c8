#include "runtime/device_dispatch.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "host/dispatch_rules.h"
#include "runtime/captured.h"
#include "runtime/device_exchange.h"
#include "runtime/dispatch_launches.h"

namespace moe::runtime {

namespace {

using kernels::ExchangeParams;
using kernels::OperationStatus;
using layout::ReceiveWindow;
using layout::RowLayout;
using layout::RowStatus;

/// One dispatch between its rows and its end.
class DeviceDispatch {
 public:
  DeviceDispatch(DeviceEndpoint& endpoint,
                 const host::DispatchParams& params,
                 DeviceExchange& exchange)
      : endpoint_(endpoint),
        params_(params),
        exchange_(exchange),
        num_ranks_(endpoint.num_ranks()),
        arrangement_(params.plan
                         ? params.plan->arrangement
                         : host::arrangement_of(endpoint, params.layout, params.expert_alignment)),
        launches_(endpoint, params, arrangement_, Contents::kUnset) {}

  host::DispatchOutcome run() {
    endpoint_.follow_caller(params_.caller_mark.get());
    if (params_.plan == nullptr)
      exchange_rows();
    else
      exchange_cached_rows();
    if (!is_moving_)
      move_rows();
    return outcome();
  }

 private:
  bool is_low_latency() const { return arrangement_.layout == RowLayout::kLowLatency; }
  layout::OperationArguments arguments() const {
    return host::dispatch_arguments(params_, arrangement_);
  }
  uint64_t needed(int rank_idx) const {
    return static_cast<uint64_t>(windows_[static_cast<size_t>(rank_idx)].bytes);
  }

  void move_rows() {
    exchange_.enter("data");
    if (!are_rows_sent_)
      launches_.send_rows();
    is_copied_out_ = !is_low_latency() &&
                     host::is_copied_out(endpoint_, needed(endpoint_.rank_idx()), params_.copy_out);
    // What is copied out has to be whole.
    receives_later_ = params_.is_async && !is_copied_out_;
    if (!receives_later_)
      endpoint_.launch_receive(launches_.receive_params());
    is_moving_ = true;
  }

  void exchange_rows() {
    launches_.count_choices([this](int64_t bytes) { return endpoint_.scratch(bytes); });
    made_plan_ = launches_.made_plan();
    check_shortage();
    window_ = is_low_latency() ? fixed_window() : endpoint_.guess_window();
    ExchangeParams row = row_params();
    // What the text about a bad id needs of this rank.
    row.message = endpoint_.write_message(std::to_string(params_.num_topk));
    if (is_low_latency() && !params_.masked_ranks.empty()) {
      std::vector<uint8_t> is_masked(static_cast<size_t>(num_ranks_));
      for (const int rank_idx : params_.masked_ranks)
        is_masked[static_cast<size_t>(rank_idx)] = 1;
      row.is_masked = endpoint_.upload_ranks(is_masked);
    }
    exchange_.enter("rows");
    exchange_.publish(row);
    // Rows follow their counts while the host reads those. No count decides the size of a
    // low-latency window, so nobody is short; elsewhere hardly anybody is where this rank has a
    // window of the size it needed before, and if somebody is, the kernel returns at once.
    if (is_low_latency())
      move_rows();
    else
      send_rows_ahead();
    judge(exchange_.collect(true));
  }

  void send_rows_ahead() {
    // Across nodes the kernel takes part in what follows the offers, too.
    if (window_ == nullptr || endpoint_.internode() != nullptr)
      return;
    launches_.send_rows();
    are_rows_sent_ = true;
  }

  void check_shortage() {
    const std::string problem = launches_.find_shortage();
    if (!problem.empty())
      exchange_.reject(arguments(), RowStatus::kInvalidArgument, problem);
  }

  ExchangeParams row_params() {
    ExchangeParams row = launches_.row();
    if (window_) {
      exchange_.offer(window_);
      row.offer = window_->offer();
    }
    return row;
  }

  /// Every rank finds the same in the same rows, before any row moves; so did the kernel.
  void judge(host::Rows rows) {
    outcome_.gradients = host::unite_gradients(rows, endpoint_.group());
    const int own_rank = endpoint_.rank_idx();
    const layout::Placement& placement = endpoint_.placement();
    outcome_.num_required_rows =
        layout::num_required_rows(rows.counts, placement, arrangement_, own_rank);
    outcome_.num_dropped_per_expert =
        host::choices_of_own_experts(rows.counts, placement, own_rank);
    if (!is_low_latency())
      check_overflow(rows.counts);
    layout::CountMatrix kept =
        layout::keep_rows(std::move(rows.counts), placement, arrangement_, params_.capacity);
    // What a masked rank asks for takes no place of an expert.
    if (is_low_latency())
      check_overflow(kept);
    windows_ = host::lay_out_windows(kept, placement, arrangement_, params_);
    static_cast<host::PlanHeader&>(*made_plan_) = host::PlanHeader::make(
        arrangement_, std::move(kept), placement, own_rank, params_.num_tokens, params_.num_topk);
    plan_ = made_plan_;
    const auto& kept_choices = plan_->received.num_tokens_per_expert;
    for (size_t e = 0; e < kept_choices.size(); ++e)
      outcome_.num_dropped_per_expert[e] -= kept_choices[e];
    exchange_second_offers(rows);
    endpoint_.remember_need(needed(own_rank));
  }

  void check_overflow(const layout::CountMatrix& asked) {
    if (const std::exception_ptr error =
            host::find_overflow(asked, endpoint_.placement(), arrangement_, params_)) {
      exchange_.settle(OperationStatus::kOverflow);
      std::rethrow_exception(error);
    }
  }

  /// A low-latency window does not depend on counts: it is there before the rows are.
  std::shared_ptr<Window> fixed_window() {
    if (params_.window)
      return params_.window;
    try {
      return exchange_.allocate(
          static_cast<uint64_t>(host::low_latency_window(endpoint_, params_).bytes));
    } catch (const CapacityError& error) {
      exchange_.reject(arguments(), error);
    }
  }

  /// A rank whose offer is too small obtains memory; everybody sees who that is in the same matrix.
  void exchange_second_offers(const host::Rows& rows) {
    std::vector<Offer> offers;
    for (const auto& header : rows.headers)
      offers.push_back(header.offer);
    const std::vector<int> short_ranks =
        host::find_short_ranks(windows_, offers, endpoint_.group());
    if (short_ranks.empty())
      return;
    are_rows_sent_ = false;
    kernels::OwnOffer own;
    if (std::find(short_ranks.begin(), short_ranks.end(), endpoint_.rank_idx()) !=
        short_ranks.end())
      own = make_second_offer();
    exchange_.enter("offers");
    const auto seconds = exchange_.exchange_offers(launches_.tables().tables, short_ranks, own);
    if (const std::exception_ptr error = host::find_shortage(
            short_ranks, seconds, windows_, plan_->counts, endpoint_.placement(), arrangement_)) {
      exchange_.settle(OperationStatus::kShort);
      std::rethrow_exception(error);
    }
  }

  kernels::OwnOffer make_second_offer() {
    kernels::OwnOffer own;
    own.needed_bytes = needed(endpoint_.rank_idx());
    // Nobody has learned of the first offer's use: with it too small, no rank writes there.
    window_ = nullptr;
    exchange_.withdraw_offers();
    try {
      window_ = exchange_.allocate(own.needed_bytes);
      exchange_.offer(window_);
      own.offer = window_->offer();
    } catch (const CapacityError& error) {
      own.available_bytes = error.available_bytes;
    }
    return own;
  }

  void exchange_cached_rows() {
    plan_ = std::static_pointer_cast<const DevicePlan>(params_.plan);
    launches_.take_plan(*plan_);
    outcome_.num_required_rows = layout::num_required_rows(
        plan_->counts, endpoint_.placement(), arrangement_, endpoint_.rank_idx());
    outcome_.num_dropped_per_expert.resize(plan_->received.num_tokens_per_expert.size());
    windows_ = host::lay_out_windows(plan_->counts, endpoint_.placement(), arrangement_, params_);
    const std::string problem = host::find_failed_ranks(*plan_, endpoint_.group());
    if (!problem.empty())
      exchange_.reject(arguments(), RowStatus::kInvalidArgument, problem);
    check_shortage();
    try {
      window_ = params_.window ? params_.window : exchange_.allocate(needed(endpoint_.rank_idx()));
    } catch (const CapacityError& error) {
      exchange_.reject(arguments(), error);
    }
    exchange_.enter("rows");
    exchange_.publish(row_params());
    move_rows();  // every size is known
    outcome_.gradients = host::unite_gradients(exchange_.collect(false), endpoint_.group());
  }

  host::DispatchOutcome outcome() {
    const int own_rank = endpoint_.rank_idx();
    const ReceiveWindow& window = windows_[static_cast<size_t>(own_rank)];
    if (!window_)
      window_ = endpoint_.memory().allocate(0);
    const auto copy_out = is_copied_out_ ? host::CopyOut::kAlways : host::CopyOut::kNever;
    auto owner = copy_out_window(endpoint_, window_, needed(own_rank), copy_out, &outcome_.rows);
    if (receives_later_) {
      outcome_.end = exchange_.receive_later(launches_.receive_params());
    } else {
      exchange_.enter("done");
      outcome_.end = exchange_.finish();
    }
    exchange_.withdraw_offers();
    if (!is_low_latency())
      window_->shrink(needed(own_rank));
    outcome_.owner = std::move(owner);
    outcome_.plan = plan_;
    outcome_.waited_ns = endpoint_.take_waited_ns();
    outcome_.scale_map = window.scales;
    if (params_.num_scales > 0)
      outcome_.scales = outcome_.rows + window.scales_offset;
    if (params_.weight_bytes > 0)
      outcome_.weights = outcome_.rows + window.weights_offset;
    outcome_.has_topk_idx = params_.with_topk_idx(arrangement_);
    if (outcome_.has_topk_idx)
      outcome_.topk_idx = outcome_.rows + window.topk_idx_offset;
    const DispatchTables& tables = launches_.tables();
    outcome_.expert_offsets = std::shared_ptr<void>(tables.memory, tables.tables.expert_offsets);
    return std::move(outcome_);
  }

  DeviceEndpoint& endpoint_;
  const host::DispatchParams& params_;
  DeviceExchange& exchange_;
  int num_ranks_;
  layout::Arrangement arrangement_;
  DispatchLaunches launches_;
  host::DispatchOutcome outcome_;
  std::shared_ptr<DevicePlan> made_plan_;
  std::shared_ptr<const DevicePlan> plan_;
  std::shared_ptr<Window> window_;
  std::vector<ReceiveWindow> windows_;
  bool are_rows_sent_ = false;  ///< unless the exchange has found that rows may not move
  bool is_moving_ = false;
  bool is_copied_out_ = false;
  bool receives_later_ = false;
};

}  // namespace

std::shared_ptr<void> copy_out_window(DeviceEndpoint& endpoint,
                                      std::shared_ptr<Window> window,
                                      uint64_t bytes,
                                      host::CopyOut mode,
                                      std::byte** data) {
  if (!host::is_copied_out(endpoint, bytes, mode)) {
    *data = window->data();
    return window;
  }
  auto copy = endpoint.device().allocate_unset(static_cast<int64_t>(bytes));
  endpoint.stream().copy(copy.get(), window->data(), static_cast<int64_t>(bytes));
  *data = copy.get();
  return copy;
}

host::DispatchOutcome dispatch(DeviceEndpoint& endpoint,
                               const host::DispatchParams& params,
                               const host::InterruptCheck& interrupt_check) {
  if (endpoint.is_capturing())
    return capture_dispatch(endpoint, params);
  if (params.plan)
    check_has_counts(static_cast<const DevicePlan&>(*params.plan));
  const auto operation =
      params.plan ? layout::Operation::kCachedDispatch : layout::Operation::kDispatch;
  return host::run_operation<DeviceExchange>(
      endpoint, operation, interrupt_check, [&](DeviceExchange& exchange) {
        return DeviceDispatch(endpoint, params, exchange).run();
      });
}

}  // namespace moe::runtime
