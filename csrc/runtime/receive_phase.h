#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/buffer_operation.h"
#include "ops/dispatch.h"
#include "ops/endpoint_base.h"
#include "runtime/call_order.h"

namespace moe::runtime {

/// The second phase of a dispatch whose caller asks for its end later: the receive kernel.
///
/// A dispatch that is asynchronous ends on the host when this rank's rows are on their way. What is
/// left is a kernel that waits for those of its peers; it starts when somebody wants to know, so
/// that until then nothing of this rank waits on an SM or holds up the stream. No peer depends on
/// it: done flags are raised by those who send. The tables that it reads are the next operation's
/// too, so that one starts it first, as do recover() and destroy(); windows that peers may still
/// write to are kept until then. Thread-safe.
class ReceivePhase : public ops::DeferredJoin {
 public:
  using Launch = std::function<void()>;  ///< puts the kernel into the buffer's stream

  /// Phase of a captured operation: a plan's status says what came of it, and nobody waits.
  static std::shared_ptr<ReceivePhase> captured(CallOrder& order, Launch launch);
  /// Phase of a caller that is a stream, which waits for the kernel from the moment it joins.
  /// @param left  The operation; peers write to what it has offered.
  static std::shared_ptr<ReceivePhase> of_stream(ops::EndpointBase& endpoint,
                                                 CallOrder& order,
                                                 Launch launch,
                                                 ops::RemainingOperation left);
  /// Phase of a caller that is the host: the progress thread runs @p receive to its end, once.
  /// @param receive  Returns nanoseconds waited for every rank.
  static std::shared_ptr<ReceivePhase> of_host(ops::EndpointBase& endpoint,
                                               std::function<std::vector<int64_t>()> receive);

  /// Starts it, unless somebody has. Does not wait.
  virtual void start() = 0;
  /// Before the next operation: work put into the stream from now on runs behind it, and where the
  /// caller is the host, it has ended. What ended it is join()'s to say.
  virtual void settle(const group::InterruptCheck& interrupt_check) = 0;
  /// Nobody will join it any more.
  virtual void drop() noexcept {}
};

/// The phase of a buffer's last operation, a dispatch that has sent and is yet to receive.
/// Thread-safe.
class OpenReceive {
 public:
  /// @return the end of @p phase, for the outcome.
  std::shared_ptr<ops::DeferredJoin> open(std::shared_ptr<ReceivePhase> phase);
  /// Before the next operation; see ReceivePhase::settle().
  void settle(const group::InterruptCheck& interrupt_check);
  /// See ReceivePhase::start().
  void start() const;

 private:
  std::shared_ptr<ReceivePhase> phase() const;

  mutable std::mutex mutex_;
  std::shared_ptr<ReceivePhase> phase_;  ///< null for none
};

}  // namespace moe::runtime
