#include "bindings/shared/signals.h"

#include <pybind11/pybind11.h>

#include "core/sync.h"

namespace moe::bindings {

namespace py = pybind11;

const host::InterruptCheck& signal_check() {
  static const host::InterruptCheck check = [] {
    // Taking the GIL is dear while other threads compute: at most ten times a second.
    constexpr int64_t kEveryNs = 100'000'000;
    thread_local int64_t checked_ns = sync::now_ns();
    const int64_t now_ns = sync::now_ns();
    if (now_ns - checked_ns < kEveryNs)
      return;
    checked_ns = now_ns;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0)
      throw py::error_already_set();
  };
  return check;
}

}  // namespace moe::bindings
