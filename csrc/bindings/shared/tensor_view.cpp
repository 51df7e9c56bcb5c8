#include "bindings/shared/tensor_view.h"

#include <vector>

#include "bindings/shared/tensor_behind.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

/// Attribute names, made once: a lookup by an interned name compares addresses.
struct ViewNames {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* element_size = PyUnicode_InternFromString("element_size");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* storage = PyUnicode_InternFromString("untyped_storage");
  PyObject* storage_offset = PyUnicode_InternFromString("storage_offset");
  PyObject* stride = PyUnicode_InternFromString("stride");
};

const ViewNames& view_names() {
  static const ViewNames interned;
  return interned;
}

py::object taken(PyObject* answer) {
  if (answer == nullptr)
    throw py::error_already_set();
  return py::reinterpret_steal<py::object>(answer);
}

py::object ask(py::handle object, PyObject* name) {
  return taken(PyObject_CallMethodNoArgs(object.ptr(), name));
}

int64_t int64_of(py::handle object) {
  const long long value = PyLong_AsLongLong(object.ptr());
  if (value == -1 && PyErr_Occurred())
    throw py::error_already_set();
  return value;
}

/// Bytes from the first element to behind the last; 0 where there are none.
int64_t reach_of(const DlpackTensor& tensor, int64_t element_bytes) {
  int64_t last = 0;
  for (int32_t dim = 0; dim < tensor.num_dims; ++dim) {
    if (tensor.shape[dim] == 0)
      return 0;
    last += (tensor.shape[dim] - 1) * tensor.strides[dim];
  }
  return (last + 1) * element_bytes;
}

/// A tensor as torch's methods tell it.
struct Attributes {
  DlpackTensor tensor{};
  int64_t element_bytes = 0;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;

  /// Attributes of tensors that torch's C functions cannot describe: subclasses, dtypes without a
  /// name in DLPack.
  explicit Attributes(py::handle object) {
    const ViewNames& names = view_names();
    tensor.data = reinterpret_cast<void*>(int64_of(ask(object, names.data_ptr)));
    element_bytes = int64_of(ask(object, names.element_size));
    const auto read = [](const py::object& numbers, std::vector<int64_t>* values) {
      for (const py::handle value : py::reinterpret_borrow<py::tuple>(numbers))
        values->push_back(int64_of(value));
    };
    read(taken(PyObject_GetAttr(object.ptr(), names.shape)), &shape);
    read(ask(object, names.stride), &strides);
    tensor.num_dims = static_cast<int32_t>(shape.size());
    tensor.shape = shape.data();
    tensor.strides = strides.data();
  }
};

TensorView view_as(const DlpackTensor& tensor, int64_t element_bytes) {
  TensorView view;
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  view.element_bytes = element_bytes;
  if (tensor.num_dims > 0)
    view.num_rows = tensor.shape[0];
  for (int32_t dim = 1; dim < tensor.num_dims; ++dim)
    view.row_elements *= tensor.shape[dim];
  return view;
}

TensorView checked_view(py::handle object,
                        const DlpackTensor& tensor,
                        int64_t element_bytes,
                        const char* name) {
  const TensorView view = view_as(tensor, element_bytes);
  check_memory(object, view.data, reach_of(tensor, element_bytes), element_bytes, name);
  return view;
}

StorageView storage_of(py::handle tensor) {
  if (const auto behind = storage_behind(tensor))
    return *behind;
  const ViewNames& names = view_names();
  return {int64_of(ask(ask(tensor, names.storage), names.nbytes)),
          int64_of(ask(tensor, names.storage_offset))};
}

/// The problem with a tensor of which torch has said that it has no address: a fake, a sparse or a
/// wrapped one.
std::string without_address(py::error_already_set& error) {
  if (!error.matches(PyExc_RuntimeError))
    throw;
  const auto text = py::str(error.value()).cast<std::string>();
  return concat("has no memory of its own: ", text.substr(0, text.find('\n')));
}

}  // namespace

TensorView view_of(const DlpackTensor& tensor) {
  return view_as(tensor, tensor.element_bytes());
}

TensorView view_tensor(py::handle tensor, const char* name) {
  if (tensor.is_none())
    return {};
  DlpackTensor described;
  if (describe_tensor(tensor, &described))
    return checked_view(tensor, described, described.element_bytes(), name);
  const Attributes attributes(tensor);
  return checked_view(tensor, attributes.tensor, attributes.element_bytes, name);
}

std::optional<std::string> problem_with_memory(py::handle tensor,
                                               const void* data,
                                               int64_t reach_bytes,
                                               int64_t element_bytes) {
  if (reach_bytes == 0)
    return std::nullopt;
  try {
    const auto [storage_bytes, offset] = storage_of(tensor);
    const int64_t begin = offset * element_bytes;
    if (begin + reach_bytes > storage_bytes)
      return concat("has elements in bytes [",
                    begin,
                    ", ",
                    begin + reach_bytes,
                    ") of a storage of ",
                    storage_bytes,
                    " bytes, which was freed or cut");
    if (data == nullptr)
      return concat("has no memory: its storage of ", storage_bytes, " bytes is nowhere");
    return std::nullopt;
  } catch (py::error_already_set& error) {
    return without_address(error);
  }
}

std::optional<std::string> problem_with_memory(py::handle tensor) {
  try {
    DlpackTensor described;
    if (describe_tensor(tensor, &described)) {
      const int64_t element_bytes = described.element_bytes();
      return problem_with_memory(
          tensor, view_of(described).data, reach_of(described, element_bytes), element_bytes);
    }
    const Attributes attributes(tensor);
    return problem_with_memory(tensor,
                               attributes.tensor.data,
                               reach_of(attributes.tensor, attributes.element_bytes),
                               attributes.element_bytes);
  } catch (py::error_already_set& error) {
    return without_address(error);
  }
}

bool is_negated(py::handle tensor) {
  if (const auto behind = is_negated_behind(tensor))
    return *behind;
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  return ask(tensor, name).ptr() != Py_False;
}

}  // namespace moe::bindings
