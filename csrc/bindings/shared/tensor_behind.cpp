#include "bindings/shared/tensor_behind.h"

#include <dlfcn.h>
#include <pybind11/gil_safe_call_once.h>

#include "bindings/shared/exchange_api.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

/// A function of torch's library, or null.
template <typename Function>
Function torch_function(const char* name) {
  void* const library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr)
    return nullptr;
  const auto found = reinterpret_cast<Function>(dlsym(library, name));
  dlclose(library);  // torch keeps it
  return found;
}

bool is_tensor_in_first_word() {
  // As in exchange_api.cpp: what runs Python may let go of the GIL.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<bool> found;
  return found
      .call_once_and_store_result([] {
        const py::object tensor = py::module_::import("torch").attr("Tensor")();
        return tensor.attr("_cdata").cast<uintptr_t>() ==
               reinterpret_cast<uintptr_t>(word_at(tensor.ptr() + 1));
      })
      .get_stored();
}

bool has_plain_tensor(py::handle object) {
  return is_plain_tensor(object) && is_tensor_in_first_word();
}

/// Functions of torch's stable C interface (`torch/csrc/inductor/aoti_torch/c/shim.h`). A handle is
/// the address of an `at::Tensor`; they return 0, or another number.
struct StorageFunctions {
  using Function = int32_t (*)(const void* tensor, int64_t* result);

  Function size = torch_function<Function>("aoti_torch_get_storage_size");
  Function offset = torch_function<Function>("aoti_torch_get_storage_offset");
};

}  // namespace

const char* tensor_behind(PyObject* object) {
  constexpr auto kLeastBytes = static_cast<Py_ssize_t>(sizeof(PyObject) + sizeof(void*));
  if (!is_tensor_in_first_word() || Py_TYPE(object)->tp_basicsize < kLeastBytes)
    return nullptr;
  return word_at(object + 1);
}

std::optional<StorageView> storage_behind(py::handle tensor) {
  static const StorageFunctions functions;
  if (functions.size == nullptr || functions.offset == nullptr || !has_plain_tensor(tensor))
    return std::nullopt;
  const void* const behind = tensor.ptr() + 1;
  StorageView view;
  if (functions.size(behind, &view.storage_bytes) != 0 ||
      functions.offset(behind, &view.offset) != 0)
    return std::nullopt;
  return view;
}

std::optional<bool> is_negated_behind(py::handle tensor) {
  static const auto is_negated =
      torch_function<bool (*)(const void*)>("_ZN2at6native6is_negERKNS_6TensorE");
  if (is_negated == nullptr || !has_plain_tensor(tensor))
    return std::nullopt;
  return is_negated(tensor.ptr() + 1);
}

BumpVersion find_bump_version() {
  static const auto found =
      torch_function<BumpVersion>("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
  return found;
}

}  // namespace moe::bindings
