#include "bindings/shared/kept_results.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "bindings/shared/exchange_api.h"
#include "bindings/shared/tensor_view.h"
#include "core/sync.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

/// Results of one kind that a caller has at a time: the last one, the one before, and as many that
/// are under way. Of more, the oldest are not kept.
constexpr size_t kMostResults = 4;
/// Tensors of different forms over one window.
constexpr size_t kMostTensors = 4;

/// What is asked of torch, looked up once.
struct Questions {
  PyObject* use_count = PyUnicode_InternFromString("_use_count");
  /// What autograd may know of a tensor: False, then None, unless somebody left something there.
  PyObject* flags[2] = {PyUnicode_InternFromString("requires_grad"),
                        PyUnicode_InternFromString("retains_grad")};
  PyObject* marks[3] = {PyUnicode_InternFromString("grad"),
                        PyUnicode_InternFromString("_backward_hooks"),
                        PyUnicode_InternFromString("_post_accumulate_grad_hooks")};
  py::object storage_use_count;  ///< null where this torch has none, or tensors cannot be described
  py::object is_inference_mode;

  Questions() {
    const py::module_ torch = py::module_::import("torch");
    is_inference_mode = torch.attr("is_inference_mode_enabled");
    const py::object count = py::getattr(torch.attr("_C"), "_storage_Use_Count", py::none());
    if (!count.is_none() && py::hasattr(torch.attr("Tensor"), "_use_count") &&
        exchange_api() != nullptr)
      storage_use_count = count;
  }
};

const Questions& questions() {
  // As in exchange_api.cpp: what runs Python may let go of the GIL.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Questions> asked;
  return asked.call_once_and_store_result([] { return Questions(); }).get_stored();
}

py::object checked(PyObject* answer) {
  if (answer == nullptr)
    throw py::error_already_set();
  return py::reinterpret_steal<py::object>(answer);
}

int64_t number(PyObject* answer) {
  return PyLong_AsLongLong(checked(answer).ptr());
}

bool is_inference_mode() {
  return checked(PyObject_CallNoArgs(questions().is_inference_mode.ptr())).ptr() == Py_True;
}

bool has_weak_references(py::handle object) {
  const Py_ssize_t offset = Py_TYPE(object.ptr())->tp_weaklistoffset;
  return offset != 0 &&
         *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + offset) != nullptr;
}

/// Whether somebody would know @p object again, by a weak reference or by an attribute.
bool is_remembered(py::handle object) {
  return has_weak_references(object) ||
         PyDict_Size(checked(PyObject_GenericGetDict(object.ptr(), nullptr)).ptr()) != 0;
}

bool is_known_to_autograd(py::handle tensor) {
  const auto is_not = [&](PyObject* name, PyObject* expected) {
    return checked(PyObject_GetAttr(tensor.ptr(), name)).ptr() != expected;
  };
  // In this order: a tensor that needs no gradient is a leaf, of which torch tells `grad` silently.
  return std::ranges::any_of(questions().flags,
                             [&](PyObject* name) { return is_not(name, Py_False); }) ||
         std::ranges::any_of(questions().marks,
                             [&](PyObject* name) { return is_not(name, Py_None); });
}

}  // namespace

KeptTensor::KeptTensor(std::shared_ptr<void> owner,
                       void* data,
                       const TensorForm& form,
                       DlpackDevice device)
    : data_(data),
      form_(form),
      is_inference_(is_inference_mode()),
      tensor_(make_tensor(std::move(owner), data, form, device)),
      storage_(tensor_.attr("untyped_storage")()),
      storage_address_(storage_.attr("_cdata")),
      idle_counts_(count()) {}

KeptTensor::Counts KeptTensor::count() const {
  return {Py_REFCNT(tensor_.ptr()),
          Py_REFCNT(storage_.ptr()),
          number(PyObject_CallMethodNoArgs(tensor_.ptr(), questions().use_count)),
          number(PyObject_CallOneArg(questions().storage_use_count.ptr(), storage_address_.ptr()))};
}

bool KeptTensor::is(const void* data, const TensorForm& form) const {
  return data == data_ && form == form_ && is_inference_ == is_inference_mode();
}

bool KeptTensor::is_held() const {
  // Most often this is seen by the first number.
  return Py_REFCNT(tensor_.ptr()) != idle_counts_.tensor_references || count() != idle_counts_;
}

bool KeptTensor::is_as_made() const {
  DlpackTensor found;
  if (!describe_tensor(tensor_, &found) || found.data != data_ || found.byte_offset != 0 ||
      found.type() != form_.dlpack_type || found.num_dims != form_.num_dims)
    return false;
  for (int dim = 0; dim < form_.num_dims; ++dim)
    if (found.shape[dim] != form_.shape[dim] ||
        (found.shape[dim] > 1 && found.strides[dim] != form_.strides[dim]))
      return false;
  return !is_remembered(tensor_) && !is_remembered(storage_) && !is_known_to_autograd(tensor_) &&
         !is_negated(tensor_);
}

bool KeptWindows::Result::is_held() const {
  // Besides this and the tensors, an operation under way may hold it, or memory set aside.
  if (window.use_count() != 1 + static_cast<long>(tensors.size()))
    return true;
  const auto is_held = [](const KeptTensor& tensor) { return tensor.is_held(); };
  if (std::ranges::any_of(tensors, is_held) ||
      std::ranges::any_of(numbers, is_held, &Numbers::tensor))
    return true;
  sync::fence_acquire();  // behind what the last holder did
  return false;
}

bool KeptWindows::Result::is_as_made() const {
  const auto is_as_made = [](const KeptTensor& tensor) { return tensor.is_as_made(); };
  return std::ranges::all_of(tensors, is_as_made) &&
         std::ranges::all_of(numbers, is_as_made, &Numbers::tensor);
}

std::shared_ptr<Window> KeptWindows::take(SymmetricMemory& memory, uint64_t bytes) {
  for (size_t i = 0; i < results_.size(); ++i) {
    const Result& result = results_[i];
    if (result.window->bytes() != bytes || result.is_held() || !result.is_as_made())
      continue;
    std::rotate(results_.begin() + static_cast<ptrdiff_t>(i),
                results_.begin() + static_cast<ptrdiff_t>(i) + 1,
                results_.end());
    return results_.back().window;
  }
  give_back();
  std::shared_ptr<Window> window = memory.allocate(bytes);
  if (questions().storage_use_count) {
    std::vector<Result> dropped;  // last of all: what it drops may run anything
    if (results_.size() == kMostResults) {
      dropped.push_back(std::move(results_.front()));
      results_.erase(results_.begin());
    }
    results_.push_back({window, {}, {}});
  }
  return window;
}

void KeptWindows::give_back() {
  std::vector<Result> idle;
  for (size_t i = results_.size(); i-- > 0;)
    if (!results_[i].is_held()) {
      idle.push_back(std::move(results_[i]));
      results_.erase(results_.begin() + static_cast<ptrdiff_t>(i));
    }
}

void KeptWindows::forget() {
  const std::vector<Result> dropped = std::exchange(results_, {});
}

KeptWindows::Result* KeptWindows::find(const Window* window) {
  for (Result& result : results_)
    if (result.window.get() == window)
      return &result;
  return nullptr;
}

py::object KeptWindows::tensor(const std::shared_ptr<Window>& window,
                               void* data,
                               const TensorForm& form,
                               DlpackDevice device) {
  if (Result* const result = find(window.get())) {
    for (const KeptTensor& kept : result->tensors)
      if (kept.is(data, form))
        return kept.tensor();
    if (result->tensors.size() < kMostTensors) {
      KeptTensor made(window, data, form, device);
      // Made anew by whatever Python has run meanwhile.
      if (Result* const now = find(window.get()); now != nullptr)
        return now->tensors.emplace_back(std::move(made)).tensor();
    }
  }
  return make_tensor(window, data, form, device);
}

py::object KeptWindows::numbers(
    const Window* window, int kind, const void* values, size_t bytes, const TensorForm& form) {
  const auto write = [&](std::vector<std::byte>& memory) {
    std::memcpy(memory.data(), values, bytes);
  };
  if (Result* const result = find(window))
    for (Numbers& kept : result->numbers)
      if (kept.kind == kind && kept.tensor.is(kept.memory->data(), form)) {
        write(*kept.memory);
        return kept.tensor.tensor();
      }
  auto memory = std::make_shared<std::vector<std::byte>>(bytes);
  write(*memory);
  if (find(window) == nullptr)
    return make_tensor(memory, memory->data(), form);
  KeptTensor made(memory, memory->data(), form, {});
  py::object tensor = made.tensor();
  if (Result* const result = find(window); result != nullptr) {
    std::erase_if(result->numbers, [&](const Numbers& kept) { return kept.kind == kind; });
    result->numbers.push_back({kind, std::move(memory), std::move(made)});
  }
  return tensor;
}

std::shared_ptr<KeptResults> make_kept_results() {
  return std::shared_ptr<KeptResults>(new KeptResults, [](KeptResults* kept) {
    if (!Py_IsInitialized())
      return;  // with the interpreter
    const py::gil_scoped_acquire gil;
    delete kept;
  });
}

}  // namespace moe::bindings
