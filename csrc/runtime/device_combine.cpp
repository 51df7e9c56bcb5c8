#include "runtime/device_combine.h"

#include <algorithm>
#include <utility>

#include "host/combine_rules.h"
#include "runtime/captured.h"
#include "runtime/combine_launches.h"
#include "runtime/device_dispatch.h"
#include "runtime/device_exchange.h"

namespace moe::runtime {

namespace {

/// One combine between its rows and its end.
class DeviceCombine {
 public:
  DeviceCombine(DeviceEndpoint& endpoint,
                const host::CombineParams& params,
                DeviceExchange& exchange)
      : endpoint_(endpoint),
        params_(params),
        plan_(static_cast<const DevicePlan&>(*params.plan)),
        exchange_(exchange),
        row_bytes_(host::combined_row_bytes(params)),
        sums_window_(host::sums_window(params)) {}

  host::CombineOutcome run() {
    endpoint_.follow_caller(params_.caller_mark.get());
    const layout::OperationArguments arguments = host::combine_arguments(params_);
    const std::string problem = host::find_failed_sources(plan_, endpoint_.group());
    if (!problem.empty())
      exchange_.reject(arguments, layout::RowStatus::kInvalidArgument, problem);
    const std::string shortage = find_shortage(endpoint_, params_);
    if (!shortage.empty())
      exchange_.reject(arguments, layout::RowStatus::kInvalidArgument, shortage);
    kernels::ExchangeParams row;
    row.tables = endpoint_.tables();
    row.arguments = arguments;
    row.num_tokens = static_cast<int32_t>(plan_.num_tokens);
    row.arrangement = plan_.arrangement;
    row.kept_counts = plan_.device_counts;
    try {
      offer_rows(&row);
      window_ = sums_window_.bytes == 0
                    ? endpoint_.memory().allocate(0)
                    : exchange_.allocate(static_cast<uint64_t>(sums_window_.bytes));
    } catch (const CapacityError& error) {
      exchange_.reject(arguments, error);
    }
    exchange_.enter("rows");
    exchange_.publish(row);
    exchange_.enter("data");
    // Every size is known: sums follow the exchange while the host reads what it brought.
    launch_sums(endpoint_,
                params_,
                endpoint_.tables(),
                params_.out != nullptr ? params_.out : window_->data(),
                window_->data() + sums_window_.weights_offset);
    gradients_ = host::unite_gradients(exchange_.collect(false), endpoint_.group());
    return outcome();
  }

 private:
  /// In place where the rows lie in this rank's heap already; else copied in, once.
  void offer_rows(kernels::ExchangeParams* row) {
    if (row_bytes_ > 0 && plan_.num_rows() > 0)
      was_copied_in_ = offer_place(params_.x, plan_.num_rows() * row_bytes_, &row->offer);
    const int64_t num_weights = host::num_row_weights(plan_);
    if (params_.row_weight_bytes > 0 && num_weights > 0)
      offer_place(params_.row_weights, num_weights * params_.row_weight_bytes, &row->weights_offer);
  }

  bool offer_place(const std::byte* source, int64_t bytes, Offer* offer) {
    if (endpoint_.memory().find(source, static_cast<uint64_t>(bytes), offer))
      return false;
    auto window = exchange_.allocate(static_cast<uint64_t>(bytes));
    endpoint_.stream().copy(window->data(), source, bytes);
    *offer = window->offer();
    // Peers may pull from it until the kernel has ended.
    exchange_.offer(window);
    pulled_from_.push_back(std::move(window));
    return true;
  }

  host::CombineOutcome outcome() {
    host::CombineOutcome outcome;
    outcome.was_copied_in = was_copied_in_;
    outcome.gradients = gradients_;
    std::byte* base = nullptr;
    auto result = copy_out_window(
        endpoint_, window_, static_cast<uint64_t>(sums_window_.bytes), params_.copy_out, &base);
    exchange_.enter("done");
    outcome.end = exchange_.finish();
    outcome.waited_ns = endpoint_.take_waited_ns();
    exchange_.withdraw_offers();
    // Where the caller is a stream, kernels may still run: what they use is kept with the result.
    outcome.owner =
        endpoint_.is_host_caller()
            ? std::move(result)
            : std::make_shared<Kept>(Kept{
                  std::move(result), std::move(window_), std::move(pulled_from_), params_.plan});
    if (row_bytes_ > 0)
      outcome.sums = params_.out != nullptr ? params_.out : base;
    if (params_.row_weight_bytes > 0)
      outcome.weights = base + sums_window_.weights_offset;
    return outcome;
  }

  struct Kept {
    std::shared_ptr<void> result;
    std::shared_ptr<Window> window;
    std::vector<std::shared_ptr<Window>> pulled_from;
    std::shared_ptr<const host::PlanHeader> plan;
  };

  DeviceEndpoint& endpoint_;
  const host::CombineParams& params_;
  const DevicePlan& plan_;
  DeviceExchange& exchange_;
  int64_t row_bytes_;
  host::SumsWindow sums_window_;
  std::vector<std::shared_ptr<Window>> pulled_from_;
  std::shared_ptr<Window> window_;
  bool was_copied_in_ = false;
  int32_t gradients_ = 0;
};

}  // namespace

host::CombineOutcome combine(DeviceEndpoint& endpoint,
                             const host::CombineParams& params,
                             const host::InterruptCheck& interrupt_check) {
  if (endpoint.is_capturing())
    return capture_combine(endpoint, params);
  check_has_counts(static_cast<const DevicePlan&>(*params.plan));
  return host::run_operation<DeviceExchange>(
      endpoint, layout::Operation::kCombine, interrupt_check, [&](DeviceExchange& exchange) {
        return DeviceCombine(endpoint, params, exchange).run();
      });
}

void weighted_gradient(DeviceEndpoint& endpoint, const kernels::WeightedGradientParams& params) {
  if (params.num_rows == 0)
    return;
  // Nobody waits for its blocks: it takes all SMs, with as many threads as hide memory's latency.
  constexpr int64_t kBlocksPerSm = 4;
  endpoint.device().activate();
  device::Launch launch;
  launch.num_threads = std::min(endpoint.num_threads(), kernels::kMaxCombineThreads);
  const int64_t rows_at_once = launch.num_threads / 32;
  launch.num_blocks = static_cast<int>(std::min((params.num_rows + rows_at_once - 1) / rows_at_once,
                                                kBlocksPerSm * endpoint.device().num_sms()));
  launch.stream = endpoint.caller_stream().handle();
  kernels::launch_weighted_gradient(launch, params);
}

}  // namespace moe::runtime
