#pragma once

#include <pybind11/pybind11.h>

namespace moe::bindings {

/// Has a bound function run without the GIL.
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

/// The result of @p call, which runs without the GIL.
template <typename Call>
auto without_gil(const Call& call) {
  const pybind11::gil_scoped_release no_gil;
  return call();
}

}  // namespace moe::bindings
