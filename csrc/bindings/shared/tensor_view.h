#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/shared/exchange_api.h"
#include "core/error.h"

namespace moe::bindings {

/// A torch tensor as this library sees it: the one place where Python's tensors become addresses.
///
/// Dtype, device and contiguity have been checked; rows are contiguous.
struct TensorView {
  std::byte* data = nullptr;
  int64_t num_rows = 0;      ///< first dimension
  int64_t row_elements = 1;  ///< product of the others
  int64_t element_bytes = 0;

  int64_t row_bytes() const { return row_elements * element_bytes; }
  int64_t bytes() const { return num_rows * row_bytes(); }
};

/// View of described memory that lies in order.
TensorView view_of(const DlpackTensor& tensor);

/// @param tensor  A tensor, or None for an empty view.
/// @param name    Name of the tensor in errors.
/// @throws InvalidArgument  its elements do not lie in its storage.
TensorView view_tensor(pybind11::handle tensor, const char* name = "the tensor");

/// Text of what keeps the elements of a tensor from lying in its storage, or nothing: a storage may
/// be freed or cut under tensors that go on to exist, and the memory of some tensors is nowhere.
/// @param data         Address of the first element, if there is any
/// @param reach_bytes  Bytes from there to behind the last element; 0 if there are none
std::optional<std::string> problem_with_memory(pybind11::handle tensor,
                                               const void* data,
                                               int64_t reach_bytes,
                                               int64_t element_bytes);

/// Likewise, of a tensor of any strides.
std::optional<std::string> problem_with_memory(pybind11::handle tensor);

/// @throws InvalidArgument  the elements of a tensor do not lie in its storage.
inline void check_memory(pybind11::handle tensor,
                         const void* data,
                         int64_t reach_bytes,
                         int64_t element_bytes,
                         const char* name = "the tensor") {
  if (const auto problem = problem_with_memory(tensor, data, reach_bytes, element_bytes))
    throw InvalidArgument(concat(name, " ", *problem));
}

/// Returns whether torch only remembers that the numbers of a tensor are to be negated.
bool is_negated(pybind11::handle tensor);

}  // namespace moe::bindings
