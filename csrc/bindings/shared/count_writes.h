#pragma once

#include <pybind11/pybind11.h>

#include "core/error.h"

// Writes to tensors that torch does not see, counted as its own: autograd then refuses to go on
// with what it has saved of them.

namespace moe::bindings {

/// @param tensors  An iterable of tensors. Those of inference mode have no count.
void count_writes(pybind11::handle tensors);

/// Likewise, one tensor.
void count_write(pybind11::handle tensor);

/// Runs what writes to a tensor or may have written when it fails: a refusal has not.
/// @param written  The tensor, or None
template <typename Body>
auto counting_write(pybind11::handle written, const Body& body) {
  const auto count = [&] {
    if (!written.is_none())
      count_write(written);
  };
  try {
    auto result = body();
    count();
    return result;
  } catch (const InvalidArgument&) {
    throw;
  } catch (const InvalidType&) {
    throw;
  } catch (const CapacityError&) {
    throw;
  } catch (...) {
    count();
    throw;
  }
}

}  // namespace moe::bindings
