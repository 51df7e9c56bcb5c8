#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "core/sync.h"
#include "runtime/device.h"

namespace moe::runtime {

/// Work of the host between two looks at a device.
///
/// An operation whose peers have come is over in a few milliseconds. So long the host stays awake:
/// a sleeper is woken 50 to 100 us after what it waits for, in which the device has nothing to do.
/// It pauses, and soon gives its core to other runnable threads, as ranks may outnumber cores.
class Polling {
 public:
  enum class Step : uint8_t { kPause, kYield, kSleep };
  static constexpr int kNumPauses = 200;
  static constexpr int64_t kAwakeNs = 5'000'000;
  static constexpr auto kSleepBetweenLooks = std::chrono::microseconds(50);

  /// @param waited_ns  since the first look
  Step next(int64_t waited_ns) {
    if (num_looks_ < kNumPauses) {
      ++num_looks_;
      return Step::kPause;
    }
    return waited_ns < kAwakeNs ? Step::kYield : Step::kSleep;
  }
  /// Makes the next step.
  void rest(int64_t waited_ns) {
    switch (next(waited_ns)) {
      case Step::kPause:
        sync::pause();
        break;
      case Step::kYield:
        sync::yield();
        break;
      case Step::kSleep:
        std::this_thread::sleep_for(kSleepBetweenLooks);
    }
  }

 private:
  int num_looks_ = 0;
};

/// Waits for work whose own waits have limits. @throws what it threw.
inline void await(const Event& event) {
  const int64_t start_ns = sync::now_ns();
  for (Polling polling; !event.is_complete();)
    polling.rest(sync::now_ns() - start_ns);
}

}  // namespace moe::runtime
