#include "runtime/receive_phase.h"

#include <mutex>
#include <utility>

#include "core/error.h"
#include "ops/progress.h"
#include "runtime/device_exchange.h"

namespace moe::runtime {

namespace {

/// The caller is the host: the progress thread runs it to its end.
class HostReceive final : public ReceivePhase, public std::enable_shared_from_this<HostReceive> {
 public:
  HostReceive(DeviceEndpoint& endpoint,
              const kernels::ReceiveParams& params,
              ops::RemainingOperation left)
      : endpoint_(endpoint), params_(params), left_(std::move(left)) {}

  void start() override {
    // A busy progress thread runs a later operation, which settles this one.
    if (!pending_.is_complete() && endpoint_.progress().is_idle())
      submit({});
  }

  void settle(const group::InterruptCheck& interrupt_check) override {
    if (endpoint_.is_on_progress_thread()) {
      run();
      return;
    }
    if (!pending_.is_complete())
      submit(interrupt_check);
    pending_.await(interrupt_check);
  }

  void join(const group::InterruptCheck& interrupt_check) override {
    settle(interrupt_check);
    pending_.wait(interrupt_check);
  }

  bool is_complete() override {
    start();
    return pending_.is_complete();
  }

  std::vector<int64_t> waited_ns() const override {
    const std::vector<int64_t>* const waited_ns = pending_.outcome();
    return waited_ns == nullptr ? std::vector<int64_t>() : *waited_ns;
  }

 private:
  void submit(const group::InterruptCheck& interrupt_check) {
    endpoint_.progress().submit([self = shared_from_this()] { self->run(); }, interrupt_check);
  }

  /// Called on the progress thread only; once.
  void run() {
    if (std::exchange(has_run_, true))
      return;
    pending_.run([this] {
      const group::InterruptCheck nothing;
      const group::Group::OperationScope scope(endpoint_.group());
      DeviceExchange exchange(endpoint_, std::move(left_), nothing);
      return ops::run_to_end(exchange, [&] { return exchange.receive(params_); });
    });
  }

  DeviceEndpoint& endpoint_;
  kernels::ReceiveParams params_;
  ops::RemainingOperation left_;
  bool has_run_ = false;
  ops::Pending<std::vector<int64_t>> pending_;
};

/// The caller is a stream, which waits for the kernel from the moment it joins.
class StreamReceive final : public ReceivePhase {
 public:
  StreamReceive(DeviceEndpoint& endpoint,
                const kernels::ReceiveParams& params,
                ops::RemainingOperation left)
      : endpoint_(endpoint),
        params_(params),
        left_(std::move(left)),
        caller_(endpoint.shared_caller_stream()) {}

  void start() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_)
      return;
    const auto active = endpoint_.device().activate_for_now();
    endpoint_.launch_receive(params_);
    end_ = DeviceEndpoint::join_caller(caller_, endpoint_.leave_running());
    endpoint_.complete_epoch(left_.epoch);
    // Behind the kernel nobody writes to them; after an abort peers may, until the next operation.
    if (!endpoint_.group().is_aborted())
      left_.offered.clear();
  }

  void settle(const group::InterruptCheck&) override { start(); }

  void join(const group::InterruptCheck& interrupt_check) override {
    start();
    end_->join(interrupt_check);
  }

  void drop() noexcept override {
    try {
      join({});
    } catch (...) {
      // The device has failed: nothing runs on it any more.
    }
  }

 private:
  DeviceEndpoint& endpoint_;
  kernels::ReceiveParams params_;
  ops::RemainingOperation left_;
  std::shared_ptr<Stream> caller_;
  std::mutex mutex_;
  std::shared_ptr<ops::DeferredJoin> end_;  ///< null until the kernel was launched
};

/// Part of a graph: the kernel belongs where the caller joins, or before the next operation of the
/// graph.
class CapturedReceive final : public ReceivePhase {
 public:
  CapturedReceive(DeviceEndpoint& endpoint, const kernels::ReceiveParams& params)
      : endpoint_(endpoint), params_(params), caller_(endpoint.shared_caller_stream()) {}

  void start() override {}

  void settle(const group::InterruptCheck&) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    // A capture that ended without it is void.
    if (endpoint_.stream().is_capturing())
      launch();
  }

  void join(const group::InterruptCheck&) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_joined_)
      return;
    MOE_CHECK(is_launched_ || endpoint_.stream().is_capturing(),
              "this dispatch was captured with async_op: its end has to be waited for in the "
              "capture");
    launch();
    has_joined_ = true;
    endpoint_.leave_capture(*caller_);
  }

 private:
  void launch() {
    if (std::exchange(is_launched_, true))
      return;
    const auto active = endpoint_.device().activate_for_now();
    endpoint_.launch_receive(params_);
  }

  DeviceEndpoint& endpoint_;
  kernels::ReceiveParams params_;
  std::shared_ptr<Stream> caller_;
  std::mutex mutex_;
  bool is_launched_ = false;
  bool has_joined_ = false;
};

}  // namespace

std::shared_ptr<ReceivePhase> ReceivePhase::captured(DeviceEndpoint& endpoint,
                                                     const kernels::ReceiveParams& params) {
  return std::make_shared<CapturedReceive>(endpoint, params);
}

std::shared_ptr<ReceivePhase> ReceivePhase::make(DeviceEndpoint& endpoint,
                                                 const kernels::ReceiveParams& params,
                                                 ops::RemainingOperation left) {
  if (endpoint.is_host_caller())
    return std::make_shared<HostReceive>(endpoint, params, std::move(left));
  return std::make_shared<StreamReceive>(endpoint, params, std::move(left));
}

std::shared_ptr<ops::DeferredJoin> ReceivePhase::end_of(std::shared_ptr<ReceivePhase> phase) {
  ops::DeferredJoin* const end = phase.get();
  return std::shared_ptr<ops::DeferredJoin>(
      end, [phase = std::move(phase)](ops::DeferredJoin*) { phase->drop(); });
}

}  // namespace moe::runtime
