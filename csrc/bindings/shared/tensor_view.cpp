#include "bindings/shared/tensor_view.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

/// Attribute names, made once: a lookup by an interned name compares addresses.
struct ViewNames {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* element_size = PyUnicode_InternFromString("element_size");
  PyObject* shape = PyUnicode_InternFromString("shape");
};

const ViewNames& view_names() {
  static const ViewNames interned;
  return interned;
}

int64_t call_int(py::handle object, PyObject* name) {
  const auto value =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), name));
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
  view.data = reinterpret_cast<std::byte*>(call_int(tensor, view_names().data_ptr));
  view.element_bytes = call_int(tensor, view_names().element_size);
  const auto shape =
      py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor.ptr(), view_names().shape));
  if (!shape)
    throw py::error_already_set();
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
