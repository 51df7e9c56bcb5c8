#include "bindings/tensor_view.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

py::object call(py::handle object, const char* name) {
  return py::reinterpret_steal<py::object>(
      PyObject_CallMethodNoArgs(object.ptr(), py::str(name).ptr()));
}

int64_t call_int(py::handle object, const char* name) {
  const py::object value = call(object, name);
  if (!value)
    throw py::error_already_set();
  const long long number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred())
    throw py::error_already_set();
  return number;
}

}  // namespace

TensorView view_tensor(py::handle tensor) {
  TensorView view;
  if (tensor.is_none())
    return view;
  view.data = reinterpret_cast<std::byte*>(call_int(tensor, "data_ptr"));
  view.element_bytes = call_int(tensor, "element_size");
  const py::object shape = tensor.attr("shape");
  const Py_ssize_t num_dims = PyTuple_GET_SIZE(shape.ptr());
  for (Py_ssize_t dim = 0; dim < num_dims; ++dim) {
    const int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), dim));
    if (dim == 0)
      view.num_rows = size;
    else
      view.row_elements *= size;
  }
  return view;
}

}  // namespace moe::bindings
