#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/receive.h"
#include "ops/buffer_operation.h"
#include "ops/dispatch.h"

namespace moe::runtime {

class DeviceEndpoint;

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
  /// Phase of a captured operation: a plan's status says what came of it, and nobody waits.
  static std::shared_ptr<ReceivePhase> captured(DeviceEndpoint& endpoint,
                                                const kernels::ReceiveParams& params);
  /// @param left  The operation; peers write to what it has offered.
  static std::shared_ptr<ReceivePhase> make(DeviceEndpoint& endpoint,
                                            const kernels::ReceiveParams& params,
                                            ops::RemainingOperation left);

  /// Starts it, unless somebody has. Does not wait.
  virtual void start() = 0;
  /// Before the next operation: work put into the stream from now on runs behind it, and where the
  /// caller is the host, it has ended. What ended it is join()'s to say.
  virtual void settle(const group::InterruptCheck& interrupt_check) = 0;
  /// Nobody will join it any more.
  virtual void drop() noexcept {}

  /// End of @p phase, for the outcome.
  static std::shared_ptr<ops::DeferredJoin> end_of(std::shared_ptr<ReceivePhase> phase);
};

}  // namespace moe::runtime
