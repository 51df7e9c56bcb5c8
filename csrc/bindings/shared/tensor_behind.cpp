#include "bindings/shared/tensor_behind.h"

#include <dlfcn.h>
#include <pybind11/gil_safe_call_once.h>

#include <utility>

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
  // Code that runs Python may let go of the GIL, as in exchange_api.cpp.
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

/// A tensor, and what its fields must hold.
struct KnownTensor {
  py::object object;
  const char* tensor;
  const char* storage;
  uintptr_t data;
  uintptr_t keys;

  KnownTensor(const py::module_& torch, py::object given)
      : object(std::move(given)), tensor(tensor_behind(object.ptr())) {
    const py::object storage_object = object.attr("untyped_storage")();
    storage = reinterpret_cast<const char*>(storage_object.attr("_cdata").cast<uintptr_t>());
    data = storage_object.attr("data_ptr")().cast<uintptr_t>();
    const py::object found = torch.attr("_C").attr("_dispatch_keys")(object);
    keys = found.attr("raw_repr")().cast<uintptr_t>();
  }
};

/// Distance from the addresses of both at which the words @p a and @p b lie.
std::optional<size_t> find_words(const char* first, uintptr_t a, const char* second, uintptr_t b) {
  constexpr size_t kMostBytes = 192;
  for (size_t at = 0; at < kMostBytes; at += sizeof(uintptr_t))
    if (reinterpret_cast<uintptr_t>(word_at(first + at)) == a &&
        reinterpret_cast<uintptr_t>(word_at(second + at)) == b)
      return at;
  return std::nullopt;
}

std::optional<TensorFields> find_tensor_fields() {
  try {
    const auto torch = py::module_::import("torch");
    // They differ in every field that is looked for.
    const KnownTensor plain(torch, torch.attr("empty")(3));
    const KnownTensor negated(torch, torch.attr("_neg_view")(torch.attr("empty")(5)));
    if (plain.tensor == nullptr || negated.tensor == nullptr || plain.keys == negated.keys)
      return std::nullopt;
    const auto begin = find_words(plain.tensor,
                                  reinterpret_cast<uintptr_t>(plain.storage),
                                  negated.tensor,
                                  reinterpret_cast<uintptr_t>(negated.storage));
    const auto keys = find_words(plain.tensor, plain.keys, negated.tensor, negated.keys);
    const auto data = find_words(plain.storage, plain.data, negated.storage, negated.data);
    if (!begin || !keys || !data || *keys < *begin)
      return std::nullopt;
    return TensorFields{*begin, *keys + sizeof(uint64_t), *data};
  } catch (const py::error_already_set&) {
    return std::nullopt;
  }
}

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

const std::optional<TensorFields>& tensor_fields() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<std::optional<TensorFields>> found;
  return found.call_once_and_store_result(find_tensor_fields).get_stored();
}

BumpVersion find_bump_version() {
  static const auto found =
      torch_function<BumpVersion>("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
  return found;
}

}  // namespace moe::bindings
