#include "bindings/shared/signals.h"

#include <pybind11/pybind11.h>

#include <string>

#include "core/sync.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

/// Error that a handler of a signal raised. Peers are told its kind and message; where in this
/// process's sources it was raised, which pybind11 adds to both, is of no use to them.
class RaisedBySignal : public py::error_already_set {
 public:
  RaisedBySignal() : text_(py::str(type().attr("__name__"))) {
    std::string message;
    try {
      message = py::str(value());
    } catch (const py::error_already_set&) {  // runs Python: it has no text, or another signal came
    }
    if (PyErr_GivenExceptionMatches(type().ptr(), PyExc_KeyboardInterrupt) != 0)
      text_ = "it was interrupted (" + text_ + ")";
    if (!message.empty())
      text_ += ": " + message;
  }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

}  // namespace

const group::InterruptCheck& signal_check() {
  static const group::InterruptCheck check = [] {
    // Taking the GIL is dear while other threads compute: at most ten times a second.
    constexpr int64_t kEveryNs = 100'000'000;
    thread_local int64_t checked_ns = sync::now_ns();
    const int64_t now_ns = sync::now_ns();
    if (now_ns - checked_ns < kEveryNs)
      return;
    checked_ns = now_ns;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0)
      throw_raised_by_signal();
  };
  return check;
}

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

void throw_raised_by_signal() {
  throw RaisedBySignal();
}

}  // namespace moe::bindings
