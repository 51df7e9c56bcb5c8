#include "runtime/call_order.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "runtime/deferred_agreement.h"
#include "runtime/polling.h"

namespace moe::runtime {

namespace {

/// See ops::DeferredJoin.
class StreamJoin : public ops::DeferredJoin {
 public:
  StreamJoin(std::shared_ptr<Stream> caller, std::shared_ptr<Event> end)
      : caller_(std::move(caller)), end_(std::move(end)) {}
  ~StreamJoin() override {
    try {
      join({});
    } catch (...) {
      // The device has failed: nothing runs on it any more.
    }
  }

  void join(const group::InterruptCheck&) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!end_)
      return;
    // A graph that is being recorded cannot wait for what is outside of it.
    if (caller_->is_capturing())
      await(*end_);
    else
      caller_->wait(*end_);
    end_ = nullptr;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Stream> caller_;
  std::shared_ptr<Event> end_;  ///< null once joined
};

/// Mark of the caller's stream as an operation of the progress thread was called.
struct CallerMark {
  std::shared_ptr<Event> end;
  /// Verdict of another buffer's operation before it, or null.
  std::shared_ptr<DeferredAgreement> verdict;
};

std::shared_ptr<Stream> make_stream(Device& device) {
  device.activate();
  return device.create_stream();
}

}  // namespace

CallOrder::CallOrder(ops::EndpointBase& endpoint, Device& device, DeviceWatch& watch)
    : endpoint_(endpoint),
      device_(device),
      watch_(watch),
      stream_(make_stream(device)),
      may_be_captured_(device.has_host_caller()),
      baton_(device.create_baton()) {}

void CallOrder::set_caller(uintptr_t handle, const group::InterruptCheck& interrupt_check) {
  std::shared_ptr<Stream> stream = device_.caller_stream(handle);
  if (stream == caller_)
    return;
  endpoint_.progress().wait_idle(interrupt_check);
  if (!has_called(stream))
    former_callers_.push_back(stream);
  caller_ = std::move(stream);
}

/// Asked for once it is needed: memory that is given back waits for every stream that was.
const std::shared_ptr<Stream>& CallOrder::caller() const {
  if (caller_ == nullptr)
    caller_ = device_.caller_stream(0);
  return caller_;
}

std::vector<std::shared_ptr<Stream>> CallOrder::busy_others() const {
  auto streams = device_.caller_streams();
  std::erase_if(streams,
                [this](const auto& stream) { return stream == caller_ || stream->is_idle(); });
  return streams;
}

bool CallOrder::has_called(const std::shared_ptr<Stream>& stream) const {
  return std::ranges::count(former_callers_, stream) > 0;
}

std::shared_ptr<const void> CallOrder::mark_caller() const {
  if (device_.has_host_caller())
    return nullptr;
  return std::make_shared<CallerMark>(
      CallerMark{caller()->record(), DeferredAgreement::of_another(endpoint_, *caller())});
}

void CallOrder::wait_for_caller(const void* mark) {
  if (device_.has_host_caller())
    return;
  if (mark != nullptr) {
    const auto& [end, verdict] = *static_cast<const CallerMark*>(mark);
    if (verdict != nullptr)
      verdict->hear_for(endpoint_, {});
    stream_->wait(*end);
  } else {
    stream_->wait(*caller()->record_uncaptured());
  }
  if (has_graphs())
    stream_->take(*baton_);
}

std::shared_ptr<ops::DeferredJoin> CallOrder::join(std::shared_ptr<Stream> caller,
                                                   std::shared_ptr<Event> end) {
  return std::make_shared<StreamJoin>(std::move(caller), std::move(end));
}

std::shared_ptr<Event> CallOrder::leave_running() {
  auto end = stream_->record_uncaptured();
  go_before_graphs();
  watch_.follow(end);
  return end;
}

/// Its own stream is captured behind the caller's only; a capture of another stream that the caller
/// has left meanwhile may be open.
bool CallOrder::is_capturing() const {
  if (caller()->is_capturing())
    return true;
  if (!may_be_captured_.load(std::memory_order_relaxed))
    return false;
  const bool is_captured = stream_->is_capturing();
  if (!is_captured && !device_.has_host_caller())
    may_be_captured_.store(false, std::memory_order_relaxed);
  return is_captured;
}

/// Graphs run in the stream where the caller is the host.
void CallOrder::enter_capture() {
  if (!device_.has_host_caller()) {
    may_be_captured_.store(true, std::memory_order_relaxed);
    const bool is_first = !stream_->is_capturing();
    if (is_first && !has_graphs())
      stream_->give(*baton_);
    stream_->wait(*caller()->record());
    if (is_first)
      stream_->take(*baton_);
  }
  ++num_captured_;
  watch_.follow_always();
}

void CallOrder::leave_capture(Stream& caller) {
  if (device_.has_host_caller() || !stream_->is_capturing())
    return;
  stream_->give(*baton_);
  caller.wait(*stream_->record());
}

void CallOrder::go_before_graphs() {
  if (has_graphs() && !device_.has_host_caller())
    stream_->give(*baton_);
}

bool CallOrder::is_idle() const {
  return stream_->is_idle() &&
         (!has_graphs() || device_.has_host_caller() || baton_->is_complete());
}

void CallOrder::synchronize() {
  await(*stream_->record());
}

void CallOrder::drain() noexcept {
  try {
    synchronize();
  } catch (...) {
    // A kernel failed in itself, and nothing behind it runs: the calls that waited for it have
    // raised.
  }
}

void CallOrder::drain_graphs() noexcept {
  try {
    if (has_graphs() && !device_.has_host_caller())
      stream_->take(*baton_);
  } catch (...) {
    // A kernel failed, as in drain().
  }
  drain();
}

}  // namespace moe::runtime
