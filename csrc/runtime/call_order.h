#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/endpoint_base.h"
#include "runtime/device.h"
#include "runtime/device_watch.h"

namespace moe::runtime {

/// Order of one buffer's kernels, which share a stream, among the work of its callers: their
/// streams, and graphs that operations were captured into.
class CallOrder {
 public:
  /// All of them outlive this.
  CallOrder(ops::EndpointBase& endpoint, Device& device, DeviceWatch& watch);

  Device& device() const { return device_; }
  /// The stream of this buffer's kernels.
  const std::shared_ptr<Stream>& stream() const { return stream_; }
  /// The caller's stream, for local work that is the caller's alone; the default stream where none
  /// was set.
  const std::shared_ptr<Stream>& caller() const;
  /// The caller's stream for operations issued from now on, by the number Python knows it by. Waits
  /// for those still on the progress thread, which belong to another stream.
  void set_caller(uintptr_t handle, const group::InterruptCheck& interrupt_check);
  /// Streams of the device that have work, without the caller's.
  std::vector<std::shared_ptr<Stream>> busy_others() const;
  /// Returns whether operations of this buffer were called from @p stream.
  bool has_called(const std::shared_ptr<Stream>& stream) const;

  /// See ops::EndpointBase::mark_caller().
  std::shared_ptr<const void> mark_caller() const;
  /// Kernels launched from now on run after what the caller's stream holds, or held at @p mark.
  void wait_for_caller(const void* mark = nullptr);
  /// Makes later work of @p caller run after @p end, once somebody joins.
  static std::shared_ptr<ops::DeferredJoin> join(std::shared_ptr<Stream> caller,
                                                 std::shared_ptr<Event> end);
  /// Work put into the stream so far runs on with nobody waiting for it. @return its end.
  std::shared_ptr<Event> leave_running();

  /// Returns whether operations are being recorded into a graph.
  bool is_capturing() const;
  /// As wait_for_caller(), of kernels that are captured: an operation more. In every run the first
  /// of them go behind what the buffer was given before, by the order of the host's calls.
  void enter_capture();
  /// Makes later work of @p caller run after the kernels captured so far, and so, behind
  /// a run of the graph, further operations of the buffer, in whichever streams.
  void leave_capture(Stream& caller);
  /// Number of operations that were captured.
  size_t num_captured() const { return num_captured_; }
  /// Returns whether there are graphs, which may have advanced the epoch on the device beyond what
  /// the host knows. An operation then is in the stream, whole, when its call returns: else a run
  /// of a graph could come between its kernels, and nobody here hears of that.
  bool has_graphs() const { return num_captured_ > 0; }
  /// Runs of graphs that are put into any stream from now on go behind what the stream holds.
  void go_before_graphs();

  /// Returns whether kernels, and runs of graphs that were put into streams, have ended.
  bool is_idle() const;
  /// Waits until the stream is empty. @throws what a kernel threw.
  void synchronize();
  /// The same where nobody can be told: what kernels wait for comes, or they leave.
  void drain() noexcept;
  /// The same, and until the runs of graphs have ended, in whichever streams.
  void drain_graphs() noexcept;

 private:
  ops::EndpointBase& endpoint_;
  Device& device_;
  DeviceWatch& watch_;
  std::shared_ptr<Stream> stream_;
  /// True where the stream may be captured and has to be asked; else it is not captured.
  mutable std::atomic<bool> may_be_captured_;
  std::shared_ptr<Baton> baton_;                         ///< baton of operations beside graphs
  mutable std::shared_ptr<Stream> caller_;               ///< null until it is first needed
  std::vector<std::shared_ptr<Stream>> former_callers_;  ///< each once
  size_t num_captured_ = 0;
};

}  // namespace moe::runtime
