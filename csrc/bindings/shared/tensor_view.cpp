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

/// What torch's C functions cannot describe: a subclass, a dtype that DLPack has no name for.
TensorView view_attributes(py::handle tensor) {
  TensorView view;
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

}  // namespace

TensorView view_of(const DlpackTensor& tensor) {
  TensorView view;
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  view.element_bytes = tensor.type_bits * tensor.type_lanes / 8;
  if (tensor.num_dims > 0)
    view.num_rows = tensor.shape[0];
  for (int32_t dim = 1; dim < tensor.num_dims; ++dim)
    view.row_elements *= tensor.shape[dim];
  return view;
}

TensorView view_tensor(py::handle tensor) {
  if (tensor.is_none())
    return {};
  DlpackTensor described;
  return describe_tensor(tensor, &described) ? view_of(described) : view_attributes(tensor);
}

bool is_negated(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const auto answer =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), name));
  if (!answer)
    throw py::error_already_set();
  return answer.ptr() != Py_False;
}

}  // namespace moe::bindings
