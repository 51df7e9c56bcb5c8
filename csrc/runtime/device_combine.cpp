#include "runtime/device_combine.h"

#include <algorithm>
#include <utility>

#include "ops/combine_steps.h"
#include "runtime/captured.h"
#include "runtime/combine_launches.h"
#include "runtime/device_dispatch.h"
#include "runtime/device_engine.h"

namespace moe::runtime {

namespace {

/// One combine whose rows kernels add.
class DeviceCombine : public ops::CombineSteps<DeviceEngine, DeviceCombine> {
 public:
  DeviceCombine(DeviceEndpoint& endpoint,
                const ops::CombineParams& params,
                DeviceExchange& exchange)
      : CombineSteps(endpoint, params, exchange) {}

 private:
  friend CombineSteps;

  void begin() {
    endpoint_.order().wait_for_caller(params_.caller_mark.get());
    exchange_.report_deferred_error(ops::combine_arguments(params_));
    // Kernels refuse this with a dispatch that nobody has heard of yet.
    if (!plan_.awaits_counts())
      exchange_.reject_if(find_failure(plan_), ops::combine_arguments(params_));
  }
  std::string find_problem() const { return find_shortage(endpoint_, params_); }

  bool offers_sums(Offer* offer) {
    if (!ops::adds_by_rank(endpoint_.config(), params_))
      return false;
    const auto window = allocate(static_cast<uint64_t>(rank_sums_bytes(params_)));
    exchange_.offer(window);
    *offer = launch_requests(endpoint_, params_, *window);
    requests_ = window->data();
    copied_in_.push_back(window);
    return true;
  }

  void copy_in(std::byte* target, const std::byte* source, int64_t bytes) {
    endpoint_.order().stream()->copy(target, source, bytes);
  }

  void publish(const ops::RowMessage& message) {
    kernels::ExchangeParams row = combine_row(endpoint_, params_);
    row.offer = message.offer;
    row.weights_offer = message.weights_offer;
    exchange_.publish(row);
    exchange_.enter("data");
    // Every size is known: sums follow the exchange while the host reads what it brought.
    launch_sums(endpoint_,
                params_,
                endpoint_.control().tables(),
                requests_,
                sums(),
                window_->data() + sums_window_.weights_offset);
  }

  void move(const ops::Rows& /*rows*/) {}

  ops::CombineOutcome outcome() {
    std::byte* base = nullptr;
    auto result = copy_out_window(
        endpoint_, window_, static_cast<uint64_t>(sums_window_.bytes), params_.copy_out, &base);
    exchange_.enter("done");
    outcome_.end = exchange_.finish();
    outcome_.waited_ns = endpoint_.control().take_waited_ns();
    outcome_.verdict = exchange_.defer_agreement();
    exchange_.withdraw_offers();
    for (const auto& window : copied_in_)
      WindowRing::end_use(*window);
    // Kernels may still run where the caller is a stream: what they use is kept with the result.
    outcome_.owner =
        endpoint_.is_host_caller()
            ? std::move(result)
            : std::make_shared<Kept>(
                  Kept{std::move(result), std::move(window_), std::move(copied_in_), params_.plan});
    ops::point_into_sums(params_, base, &outcome_);
    return std::move(outcome_);
  }

  struct Kept {
    std::shared_ptr<void> result;
    std::shared_ptr<Window> window;
    std::vector<std::shared_ptr<Window>> copied_in;
    std::shared_ptr<const ops::PlanHeader> plan;
  };

  std::byte* requests_ = nullptr;  ///< requests, if rows are added on their rank first
};

}  // namespace

ops::CombineOutcome combine(DeviceEndpoint& endpoint,
                            const ops::CombineParams& params,
                            const group::InterruptCheck& interrupt_check) {
  const auto active = endpoint.device().activate_for_now();
  if (endpoint.is_capturing())
    return capture_combine(endpoint, params);
  check_has_counts(static_cast<const DevicePlan&>(*params.plan));
  return ops::run_operation<DeviceExchange>(
      endpoint, layout::Operation::kCombine, interrupt_check, [&](DeviceExchange& exchange) {
        return DeviceCombine(endpoint, params, exchange).run();
      });
}

void weighted_gradient(DeviceEndpoint& endpoint, const kernels::WeightedGradientParams& params) {
  if (params.num_rows == 0)
    return;
  // Nobody waits for its blocks: it takes all SMs, with as many threads as hide memory's latency.
  endpoint.device().activate();
  device::Launch launch;
  launch.num_threads = std::min(endpoint.launcher().num_threads(), kernels::kMaxCombineThreads);
  const int64_t rows_at_once = launch.num_threads / 32;
  launch.num_blocks =
      static_cast<int>(std::min((params.num_rows + rows_at_once - 1) / rows_at_once,
                                int64_t{kBlocksPerSm} * endpoint.device().num_sms()));
  launch.stream = endpoint.order().caller()->handle();
  kernels::launch_weighted_gradient(launch, params);
}

}  // namespace moe::runtime
