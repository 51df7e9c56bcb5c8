#include "bindings/shared/exchange_api.h"

#include <pybind11/gil_safe_call_once.h>

namespace moe::bindings {

namespace py = pybind11;

namespace {

struct Torch {
  PyTypeObject* tensor_type = nullptr;
  PyTypeObject* parameter_type = nullptr;
  const ExchangeApi* api = nullptr;

  Torch() {
    const py::module_ module = py::module_::import("torch");
    py::object type = module.attr("Tensor");
    py::object parameter = module.attr("nn").attr("Parameter");
    const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    constexpr const char* kName = "dlpack_exchange_api";
    if (PyCapsule_IsValid(capsule.ptr(), kName))
      api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kName));
    while (api != nullptr && api->major != 1)
      api = api->older;
    if (api != nullptr && (api->make == nullptr || api->describe == nullptr))
      api = nullptr;
    // Kept for ever, as torch keeps it.
    tensor_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
    parameter_type = reinterpret_cast<PyTypeObject*>(parameter.release().ptr());
  }

  bool is_plain(py::handle object) const {
    const PyTypeObject* const type = Py_TYPE(object.ptr());
    return type == tensor_type || type == parameter_type;
  }
};

const Torch& torch() {
  // Looked up once. An import may let go of the GIL, under which a static variable would deadlock.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> found;
  return found.call_once_and_store_result([] { return Torch(); }).get_stored();
}

}  // namespace

const ExchangeApi* exchange_api() {
  return torch().api;
}

bool is_plain_tensor(py::handle object) {
  return torch().is_plain(object);
}

bool describe_tensor(py::handle object, DlpackTensor* out) {
  const Torch& known = torch();
  if (known.api == nullptr || !known.is_plain(object))
    return false;
  if (known.api->describe(object.ptr(), out) == 0)
    return true;
  PyErr_Clear();
  return false;
}

}  // namespace moe::bindings
