#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "bindings/shared/exchange_api.h"

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

/// What a description says, of memory that lies in it in order.
TensorView view_of(const DlpackTensor& tensor);

/// @param tensor  A tensor, or None for an empty view.
TensorView view_tensor(pybind11::handle tensor);

/// Whether torch only remembers that the numbers of a tensor are to be negated.
bool is_negated(pybind11::handle tensor);

}  // namespace moe::bindings
