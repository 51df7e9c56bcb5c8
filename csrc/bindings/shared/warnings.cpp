#include "bindings/shared/warnings.h"

#include <string>

#include "bindings/shared/signals.h"
#include "group/warn.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

void warn_in_python(const std::string& message) {
  // A warning must not take the GIL from an interpreter that is going away.
  if (!Py_IsInitialized())
    return;
  const py::gil_scoped_acquire gil;
  try {
    py::module_::import("logging").attr("getLogger")("moe_comm").attr("warning")("%s", message);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {  // of no logging: a handler of a signal, such as Ctrl-C
      error.restore();
      throw_raised_by_signal();
    }
    error.discard_as_unraisable("moe_comm warning");
  }
}

}  // namespace

void bind_warnings(py::module_& module) {
  group::set_warning_sink(&warn_in_python);
  module.def(
      "set_warning_interval",
      [](double seconds) { group::set_warning_interval_ns(static_cast<int64_t>(seconds * 1e9)); },
      py::arg("seconds"));
}

}  // namespace moe::bindings
