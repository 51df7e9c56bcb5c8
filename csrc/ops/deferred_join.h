#pragma once

#include <cstdint>
#include <vector>

#include "group/wait_site.h"

namespace moe::ops {

/// The end of an operation that runs on in a stream, which the caller is still to wait for. A
/// caller that looks at the results joins it; where the caller is a stream, so does the thread that
/// drops them, before their memory goes. Thread-safe.
class DeferredJoin {
 public:
  virtual ~DeferredJoin() = default;
  /// Makes later work of the caller's stream run after the end; where the caller is the
  /// host, blocks until the end. Idempotent. @throws what ended it, the same every time.
  virtual void join(const group::InterruptCheck& interrupt_check) = 0;
  /// Returns whether join() would return or throw at once. Who asks wants the end: what join()
  /// would start is started.
  virtual bool is_complete() { return true; }
  /// Returns whether somebody has seen the end; what it has brought may be read.
  virtual bool has_ended() const { return true; }
  /// Nanoseconds waited for every rank behind the outcome, [num_ranks] or empty. After join().
  virtual std::vector<int64_t> waited_ns() const { return {}; }
};

}  // namespace moe::ops
