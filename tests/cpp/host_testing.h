#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

// The module tests._host_testing, which no wheel has: on import it gives classes of moe_comm._host
// the methods that only tests call.

namespace moe::testing {

namespace py = pybind11;

/// Adds `kernels`: the row kernels of each instruction set. Every buffer is one-dimensional, of
/// bytes, and is used in place.
void bind_row_kernels(py::module_& parent);

}  // namespace moe::testing
