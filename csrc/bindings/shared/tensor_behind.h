#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <optional>

// Torch's own tensor behind a Python object, asked without Python: a tenth of the time, which
// operations on a few tokens notice. Nothing here where a torch keeps it elsewhere.

namespace moe::bindings {

/// The address that a word holds.
inline const char* word_at(const void* place) {
  const char* word;
  std::memcpy(&word, place, sizeof word);
  return word;
}

/// Torch's tensor behind the Python object of one; null on a torch that does not keep it in the
/// first word behind the header.
const char* tensor_behind(PyObject* object);

/// Memory that a tensor looks at.
struct StorageView {
  int64_t storage_bytes;
  int64_t offset;  ///< place of the first element, in elements
};

/// @param tensor  Neither of a subclass nor without a storage.
/// @return nothing where torch must be asked in Python.
std::optional<StorageView> storage_behind(pybind11::handle tensor);

/// Returns whether torch only remembers that the numbers of a tensor are to be negated, likewise.
std::optional<bool> is_negated_behind(pybind11::handle tensor);

/// Places of the state of torch's tensor and of its storage: distances from their
/// addresses. A tensor whose bytes are the same there has the storage, the offset, the shape, the
/// strides, the dtype, the device and the lazy signs that it had.
struct TensorFields {
  size_t begin;  ///< offset in the tensor of the address of its storage, the first of these fields
  size_t end;    ///< offset in the tensor behind its dispatch keys, the last of them
  size_t data;   ///< offset in the storage of the address of its bytes
};

/// Nothing on a torch that keeps them elsewhere.
const std::optional<TensorFields>& tensor_fields();

/// `torch::autograd::impl::bump_version`, which takes a `const at::Tensor&`: torch's tensor in a
/// word, as it lies behind the header of the Python object. Throws for tensors of inference mode.
using BumpVersion = void (*)(const void* tensor);

/// Null where torch must be asked in Python.
BumpVersion find_bump_version();

}  // namespace moe::bindings
