#include "bindings/shared/count_writes.h"

#include <pybind11/gil_safe_call_once.h>

#include "bindings/shared/tensor_behind.h"

namespace moe::bindings {

namespace py = pybind11;

void count_writes(py::handle tensors) {
  // Called by the public function, which itself runs Python and may be interrupted.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> found;
  const py::object& increment =
      found
          .call_once_and_store_result([] {
            return py::object(py::module_::import("torch").attr("_C").attr("_increment_version"));
          })
          .get_stored();
  increment(tensors);
}

void count_write(py::handle tensor) {
  static PyObject* const is_inference = PyUnicode_InternFromString("is_inference");
  const BumpVersion bump = find_bump_version();
  if (bump == nullptr || tensor_behind(tensor.ptr()) == nullptr)
    return count_writes(py::make_tuple(tensor));
  const auto answer =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), is_inference));
  if (!answer)
    throw py::error_already_set();
  if (answer.ptr() == Py_False)
    bump(tensor.ptr() + 1);
}

}  // namespace moe::bindings
