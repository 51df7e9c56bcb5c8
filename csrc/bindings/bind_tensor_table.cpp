#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/count_writes.h"
#include "bindings/shared/exchange_api.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/tensor_behind.h"
#include "bindings/shared/tensor_view.h"

// Tells whether the tensors of a model are still where they were, before every repeated refit: in
// Python the question costs more than copying ten thousand small tensors.

namespace moe::bindings {

namespace py = pybind11;

namespace {

const char* type_name(PyObject* object) {
  return Py_TYPE(object)->tp_name;
}

/// @p object, or what it is a weak reference to; null where that is gone.
py::object referent(py::handle object) {
  if (!PyWeakref_CheckRef(object.ptr()))
    return py::reinterpret_borrow<py::object>(object);
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(object.ptr(), &found) < 0)
    throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
#else
  PyObject* const found = PyWeakref_GetObject(object.ptr());
  return found == Py_None ? py::object() : py::reinterpret_borrow<py::object>(found);
#endif
}

/// Returns whether @p object is @p known, or what @p known is a weak reference to. Reads no more of
/// it than its address: the last refit has emptied the cache of it.
bool is_same(PyObject* object, PyObject* known) {
  return object == known || (PyWeakref_CheckRef(known) &&
                             object == reinterpret_cast<PyWeakReference*>(known)->wr_object);
}

/// `__dict__` of a module, or of what @p module is a weak reference to; null where that is gone.
py::object dict_of(py::handle module) {
  const py::object found = referent(module);
  if (!found)
    return found;
  PyObject* const dict = PyObject_GenericGetDict(found.ptr(), nullptr);
  if (dict == nullptr)
    PyErr_Clear();
  MOE_CHECK(dict != nullptr, "modules have attributes, got ", type_name(found.ptr()));
  return py::reinterpret_steal<py::object>(dict);
}

/// Bytes of torch's tensor behind a Python object, as they were.
///
/// The bytes tell no more than a description does, in a fraction of the time; where they differ,
/// the tensor may still be the same.
class SeenTensor {
 public:
  /// @param description  Description of @p object.
  SeenTensor(py::handle object, const DlpackTensor& description) {
    const auto& fields = tensor_fields();
    const char* const tensor = tensor_behind(object.ptr());
    if (!fields || tensor == nullptr || !is_plain_tensor(object) ||
        fields->end - fields->begin > sizeof(bytes_))
      return;
    // Shapes of many dimensions lie elsewhere, and may change there.
    const auto is_within = [&](const int64_t* dims) {
      const auto at = static_cast<size_t>(reinterpret_cast<const char*>(dims) - tensor);
      return at >= fields->begin &&
             at + static_cast<size_t>(description.num_dims) * sizeof(int64_t) <= fields->end;
    };
    const std::optional<StorageView> view = storage_behind(object);
    const char* const storage = word_at(tensor + fields->begin);
    if (!view || storage == nullptr || !is_within(description.shape) ||
        !is_within(description.strides))
      return;
    data_ = word_at(storage + fields->data);
    const auto* const place = static_cast<const char*>(description.data) + description.byte_offset;
    if (data_ == nullptr || data_ + view->offset * description.element_bytes() != place)
      return;
    object_ = object.ptr();
    tensor_ = tensor;
    std::memcpy(bytes_, tensor + fields->begin, fields->end - fields->begin);
  }

  /// Returns whether @p object is the tensor that was seen, and is what it was; may miss that it
  /// is.
  bool is_same(PyObject* object) const {
    const auto& fields = tensor_fields();
    return object == object_ && word_at(object + 1) == tensor_ &&
           std::memcmp(bytes_, tensor_ + fields->begin, fields->end - fields->begin) == 0 &&
           word_at(word_at(bytes_) + fields->data) == data_;
  }

  /// Brings what is_same() reads into the cache, which the last refit has emptied of it.
  void prefetch() const {
    if (tensor_ == nullptr)
      return;
    const auto& fields = tensor_fields();
    __builtin_prefetch(object_ + 1);
    for (const char* at = tensor_ + fields->begin; at < tensor_ + fields->end; at += 64)
      __builtin_prefetch(at);
    __builtin_prefetch(tensor_ + fields->end - 1);
    __builtin_prefetch(word_at(bytes_) + fields->data);
  }

 private:
  const PyObject* object_ = nullptr;  ///< null where it is to be described
  const char* tensor_ = nullptr;
  const char* data_ = nullptr;
  char bytes_[192];  ///< between the fields of a tensor
};

/// Places, shapes, strides, dtypes and signs of a list of tensors as they were when this was made.
///
/// Tensors are given themselves or as weak references; a weak reference to a tensor that is gone
/// matches none.
class TensorTable {
 public:
  explicit TensorTable(const py::list& tensors) : api_(exchange_api()) {
    MOE_CHECK(api_ != nullptr, "this torch describes no tensors by DLPack's exchange API");
    seen_.reserve(tensors.size());
    places_.reserve(tensors.size());
    layouts_.reserve(tensors.size());
    for (const py::handle tensor : tensors) {
      const py::object object = referent(tensor);
      MOE_CHECK(object, "tensors of a table must be alive, one of ", tensors.size(), " is gone");
      const DlpackTensor now = describe(object);
      seen_.emplace_back(object, now);
      places_.push_back(place_of(now));
      layouts_.push_back(layout_of(now, object));
      shapes_.insert(shapes_.end(), now.shape, now.shape + now.num_dims);
      strides_.insert(strides_.end(), now.strides, now.strides + now.num_dims);
    }
  }

  /// Returns whether @p tensors have these shapes and dtypes and lie at the same places.
  bool matches(const py::list& tensors) {
    if (tensors.size() != layouts_.size())
      return false;
    size_t dim = 0;  // of all tensors' dimensions, where those of the present one begin
    for (size_t i = 0; i < layouts_.size(); ++i) {
      prefetch(tensors, i);
      if (!seen_[i].is_same(object_of(tensors, i)) && !is_alike(tensors, i, dim))
        return false;
      dim += num_dims_of(layouts_[i]);
    }
    return true;
  }

 private:
  /// Returns whether a tensor is described as it was.
  bool is_alike(const py::list& tensors, size_t i, size_t dim) {
    const py::object tensor = referent(PyList_GET_ITEM(tensors.ptr(), i));
    if (!tensor)
      return false;
    const DlpackTensor now = describe(tensor);
    if (layout_of(now, tensor) != layouts_[i] || place_of(now) != places_[i] ||
        !std::equal(now.shape, now.shape + now.num_dims, shapes_.begin() + dim) ||
        !std::equal(now.strides, now.strides + now.num_dims, strides_.begin() + dim))
      return false;
    seen_[i] = SeenTensor(tensor, now);
    return true;
  }

  DlpackTensor describe(py::handle tensor) const {
    DlpackTensor description{};
    if (api_->describe(tensor.ptr(), &description) != 0)
      throw py::error_already_set();
    return description;
  }

  /// Brings tensors that come soon into the cache, and weak references to later ones.
  void prefetch(const py::list& tensors, size_t i) const {
    constexpr size_t kReferenceAhead = 32;
    constexpr size_t kTensorAhead = 16;
    if (i + kReferenceAhead < seen_.size())
      __builtin_prefetch(PyList_GET_ITEM(tensors.ptr(), i + kReferenceAhead));
    if (i + kTensorAhead < seen_.size())
      seen_[i + kTensorAhead].prefetch();
  }

  /// A tensor of the list, or None where a weak reference has lost it.
  static PyObject* object_of(const py::list& tensors, size_t i) {
    PyObject* const item = PyList_GET_ITEM(tensors.ptr(), i);
    return PyWeakref_CheckRef(item) ? reinterpret_cast<PyWeakReference*>(item)->wr_object : item;
  }

  static uintptr_t place_of(const DlpackTensor& now) {
    return reinterpret_cast<uintptr_t>(now.data) + now.byte_offset;
  }

  /// Returns whether torch only remembers that the bytes are to be negated or conjugated.
  static bool is_lazy(const DlpackTensor& now, py::handle tensor) {
    constexpr uint8_t kComplex = 5;  // DLPack's code
    return is_negated(tensor) ||
           (now.type_code == kComplex && tensor.attr("is_conj")().cast<bool>());
  }

  /// Dtype, sign, device and number of dimensions in one number.
  static uint64_t layout_of(const DlpackTensor& now, py::handle tensor) {
    return static_cast<uint64_t>(is_lazy(now, tensor)) << 47 |
           static_cast<uint64_t>(now.type_code) << 56 | static_cast<uint64_t>(now.type_bits) << 48 |
           static_cast<uint64_t>(now.type_lanes) << 32 |
           (static_cast<uint64_t>(now.device_type) & 0xFF) << 24 |
           (static_cast<uint64_t>(now.device_id) & 0xFFFF) << 8 |
           (static_cast<uint64_t>(now.num_dims) & 0xFF);
  }
  static size_t num_dims_of(uint64_t layout) { return layout & 0xFF; }

  const ExchangeApi* api_;
  std::vector<SeenTensor> seen_;
  std::vector<uintptr_t> places_;
  std::vector<uint64_t> layouts_;
  std::vector<int64_t> shapes_;
  std::vector<int64_t> strides_;
};

/// Tensors that are written together, again and again, where torch does not see it.
class WrittenTensors {
 public:
  explicit WrittenTensors(const py::iterable& tensors) : bump_(find_bump_version()) {
    for (const py::handle tensor : tensors) {
      // Those of inference mode have no count.
      if (tensor.attr("is_inference")().cast<bool>())
        continue;
      if (tensor_behind(tensor.ptr()) == nullptr)
        bump_ = nullptr;
      tensors_.append(tensor);
    }
  }

  /// Counts one write to each.
  void count() const {
    if (bump_ == nullptr) {
      count_writes(tensors_);
      return;
    }
    // Writes have emptied the cache of them: of the Python object, torch's tensor, and the
    // counter behind it.
    constexpr size_t kAhead = 16;
    const size_t size = tensors_.size();
    for (size_t i = 0; i < size; ++i) {
      if (i + 3 * kAhead < size)
        __builtin_prefetch(object_at(i + 3 * kAhead) + 1);
      if (i + 2 * kAhead < size)
        __builtin_prefetch(word_at(object_at(i + 2 * kAhead) + 1) + kCounterPlace);
      if (i + kAhead < size)
        __builtin_prefetch(word_at(word_at(object_at(i + kAhead) + 1) + kCounterPlace) +
                           kCountPlace);
      bump_(object_at(i) + 1);
    }
  }

 private:
  PyObject* object_at(size_t i) const { return PyList_GET_ITEM(tensors_.ptr(), i); }

  /// Places of the address of a tensor's counter, behind five other words, and where that has
  /// the count; hints what to fetch.
  static constexpr size_t kCounterPlace = 5 * sizeof(void*);
  static constexpr size_t kCountPlace = 2 * sizeof(void*);

  BumpVersion bump_;
  py::list tensors_;
};

/// Dictionaries as they were: Python numbers the states of all of them, up to 3.12. Neither keys
/// nor values of one of the same number have been replaced.
class SeenDicts {
 public:
  /// Returns whether the dictionary that comes next is as it was when all were found to be right.
  /// @param count  Entries of those before it.
  bool is_next(PyObject* dict, Py_ssize_t count) {
    found_.emplace_back(number_of(dict), count);
    const size_t i = found_.size() - 1;
    return i < seen_.size() && seen_[i] == found_[i] && found_[i].first != 0;
  }
  /// @param are_right  All that came since the last call.
  void end(bool are_right) {
    if (are_right)
      seen_.swap(found_);
    found_.clear();
  }

 private:
  static uint64_t number_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
    (void)dict;
    return 0;
#endif
  }

  std::vector<std::pair<uint64_t, Py_ssize_t>> seen_;
  std::vector<std::pair<uint64_t, Py_ssize_t>> found_;
};

bool hold_same_dicts(const py::list& modules,
                     const py::list& keys,
                     const py::list& values,
                     SeenDicts& seen) {
  static PyObject* const kinds[] = {PyUnicode_InternFromString("_parameters"),
                                    PyUnicode_InternFromString("_buffers"),
                                    PyUnicode_InternFromString("_modules")};
  constexpr Py_ssize_t kAhead = 32;
  Py_ssize_t count = 0;
  const auto total = static_cast<Py_ssize_t>(keys.size());
  MOE_CHECK_EQ(static_cast<Py_ssize_t>(values.size()), total, "number of values and of keys");
  for (const py::handle module : modules) {
    const py::object attributes = dict_of(module);
    if (!attributes)
      return false;
    for (PyObject* const kind : kinds) {
      PyObject* const dict = PyDict_GetItemWithError(attributes.ptr(), kind);
      if (dict == nullptr && PyErr_Occurred())
        throw py::error_already_set();
      if (dict == nullptr || !PyDict_Check(dict) || count + PyDict_GET_SIZE(dict) > total)
        return false;
      if (seen.is_next(dict, count)) {
        count += PyDict_GET_SIZE(dict);
        continue;
      }
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value); ++count) {
        if (count + kAhead < total)
          __builtin_prefetch(PyList_GET_ITEM(values.ptr(), count + kAhead));
        if (!is_same(value, PyList_GET_ITEM(values.ptr(), count)))
          return false;
        PyObject* const known = PyList_GET_ITEM(keys.ptr(), count);
        if (key == known)
          continue;
        const int is_equal = PyObject_RichCompareBool(key, known, Py_EQ);
        if (is_equal < 0)
          throw py::error_already_set();
        if (is_equal == 0)
          return false;
      }
    }
  }
  return count == total;
}

/// Returns whether modules hold, in this order, exactly @p keys and the very objects @p values as
/// parameters, buffers and submodules.
///
/// @param modules  Themselves or weak references.
/// @param values  Themselves or weak references.
/// @param seen  Dictionaries as they were found right last; of these keys and values alone.
bool hold_same(const py::list& modules,
               const py::list& keys,
               const py::list& values,
               SeenDicts& seen) {
  seen.end(false);
  const bool are_same = hold_same_dicts(modules, keys, values, seen);
  seen.end(are_same);
  return are_same;
}

/// Returns whether one of @p modules, themselves or weak references, has an attribute @p key of its
/// own.
bool any_has(const py::list& modules, py::handle key) {
  for (const py::handle module : modules) {
    const py::object attributes = dict_of(module);
    const int found = attributes ? PyDict_Contains(attributes.ptr(), key.ptr()) : 0;
    if (found < 0)
      throw py::error_already_set();
    if (found > 0)
      return true;
  }
  return false;
}

}  // namespace

void bind_tensor_table(py::module_& module) {
  py::class_<TensorTable>(module, "TensorTable")
      .def(py::init<const py::list&>(), py::arg("tensors"))
      .def("matches", &TensorTable::matches, py::arg("tensors"));
  py::class_<WrittenTensors>(module, "WrittenTensors")
      .def(py::init<const py::iterable&>(), py::arg("tensors"))
      .def("count", &WrittenTensors::count);
  module.def(
      "problem_with_memory",
      [](py::handle tensor) { return problem_with_memory(tensor); },
      py::arg("tensor"));
  py::class_<SeenDicts>(module, "SeenDicts").def(py::init<>());
  module.def("hold_same", &hold_same, Signature("modules, keys, values, seen"));
  module.def("any_has", &any_has, Signature("modules, key"));
}

}  // namespace moe::bindings
