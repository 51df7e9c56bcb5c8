#include "runtime/receive_phase.h"

#include <utility>

#include "core/error.h"
#include "ops/progress.h"

namespace moe::runtime {

namespace {

class HostReceive final : public ReceivePhase, public std::enable_shared_from_this<HostReceive> {
 public:
  HostReceive(ops::EndpointBase& endpoint, std::function<std::vector<int64_t>()> receive)
      : endpoint_(endpoint), receive_(std::move(receive)) {}

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
    pending_.run(receive_);
  }

  ops::EndpointBase& endpoint_;
  std::function<std::vector<int64_t>()> receive_;
  bool has_run_ = false;
  ops::Pending<std::vector<int64_t>> pending_;
};

class StreamReceive final : public ReceivePhase {
 public:
  StreamReceive(ops::EndpointBase& endpoint,
                CallOrder& order,
                Launch launch,
                ops::RemainingOperation left)
      : endpoint_(endpoint),
        order_(order),
        launch_(std::move(launch)),
        left_(std::move(left)),
        caller_(order.caller()) {}

  void start() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_)
      return;
    const auto active = order_.device().activate_for_now();
    launch_();
    end_ = CallOrder::join(caller_, order_.leave_running());
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
  ops::EndpointBase& endpoint_;
  CallOrder& order_;
  Launch launch_;
  ops::RemainingOperation left_;
  std::shared_ptr<Stream> caller_;
  std::mutex mutex_;
  std::shared_ptr<ops::DeferredJoin> end_;  ///< null until the kernel was launched
};

/// Part of a graph: the kernel belongs where the caller joins, or before the next operation of the
/// graph.
class CapturedReceive final : public ReceivePhase {
 public:
  CapturedReceive(CallOrder& order, Launch launch)
      : order_(order), launch_(std::move(launch)), caller_(order.caller()) {}

  void start() override {}

  void settle(const group::InterruptCheck&) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    // A capture that ended without it is void.
    if (order_.stream()->is_capturing())
      launch();
  }

  void join(const group::InterruptCheck&) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_joined_)
      return;
    MOE_CHECK(is_launched_ || order_.stream()->is_capturing(),
              "this dispatch was captured with async_op: its end has to be waited for in the "
              "capture");
    launch();
    has_joined_ = true;
    order_.leave_capture(*caller_);
  }

 private:
  void launch() {
    if (std::exchange(is_launched_, true))
      return;
    const auto active = order_.device().activate_for_now();
    launch_();
  }

  CallOrder& order_;
  Launch launch_;
  std::shared_ptr<Stream> caller_;
  std::mutex mutex_;
  bool is_launched_ = false;
  bool has_joined_ = false;
};

}  // namespace

std::shared_ptr<ReceivePhase> ReceivePhase::captured(CallOrder& order, Launch launch) {
  return std::make_shared<CapturedReceive>(order, std::move(launch));
}

std::shared_ptr<ReceivePhase> ReceivePhase::of_stream(ops::EndpointBase& endpoint,
                                                      CallOrder& order,
                                                      Launch launch,
                                                      ops::RemainingOperation left) {
  return std::make_shared<StreamReceive>(endpoint, order, std::move(launch), std::move(left));
}

std::shared_ptr<ReceivePhase> ReceivePhase::of_host(ops::EndpointBase& endpoint,
                                                    std::function<std::vector<int64_t>()> receive) {
  return std::make_shared<HostReceive>(endpoint, std::move(receive));
}

std::shared_ptr<ops::DeferredJoin> OpenReceive::open(std::shared_ptr<ReceivePhase> phase) {
  const std::lock_guard<std::mutex> lock(mutex_);
  phase_ = phase;
  ops::DeferredJoin* const end = phase.get();
  return {end, [phase = std::move(phase)](ops::DeferredJoin*) { phase->drop(); }};
}

std::shared_ptr<ReceivePhase> OpenReceive::phase() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return phase_;
}

void OpenReceive::settle(const group::InterruptCheck& interrupt_check) {
  const std::shared_ptr<ReceivePhase> phase = this->phase();
  if (phase == nullptr)
    return;
  phase->settle(interrupt_check);
  const std::lock_guard<std::mutex> lock(mutex_);
  phase_ = nullptr;
}

void OpenReceive::start() const {
  if (const auto phase = this->phase())
    phase->start();
}

}  // namespace moe::runtime
