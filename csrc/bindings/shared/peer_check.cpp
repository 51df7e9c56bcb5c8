#include "bindings/shared/peer_check.h"

#include "bindings/shared/signals.h"
#include "core/sync.h"

namespace moe::bindings {

namespace py = pybind11;

group::InterruptCheck interrupt_check_with(const py::object& check) {
  if (check.is_none())
    return signal_check();
  return [&check, checked_ns = int64_t{0}]() mutable {
    // Soon: a rank that has given up waits for those that have not heard of it.
    constexpr int64_t kEveryNs = 10'000'000;
    signal_check()();
    const int64_t now_ns = sync::now_ns();
    if (now_ns - checked_ns < kEveryNs)
      return;
    checked_ns = now_ns;
    const py::gil_scoped_acquire gil;
    check();
  };
}

}  // namespace moe::bindings
