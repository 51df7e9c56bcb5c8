#pragma once

#include <pybind11/pybind11.h>

namespace moe::bindings {

/// Adds Stream and Event to @p module: a caller's stream that runs beside the host.
void bind_stream(pybind11::module_& module);

}  // namespace moe::bindings
