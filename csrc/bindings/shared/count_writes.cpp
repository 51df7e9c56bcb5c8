#include "bindings/shared/count_writes.h"

#include <pybind11/gil_safe_call_once.h>

namespace moe::bindings {

namespace py = pybind11;

void count_writes(py::handle tensors) {
  // What the public function calls: that one runs Python, which may be interrupted.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> found;
  const py::object& increment =
      found
          .call_once_and_store_result([] {
            return py::object(py::module_::import("torch").attr("_C").attr("_increment_version"));
          })
          .get_stored();
  increment(tensors);
}

}  // namespace moe::bindings
