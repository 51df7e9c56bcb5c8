#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "host/group.h"

namespace moe::bindings {

void register_error(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_heap(pybind11::module_& module);
void bind_group(pybind11::module_& module);
void bind_buffer(pybind11::module_& module);
void bind_batched_copy(pybind11::module_& module);
void bind_tensor_table(pybind11::module_& module);

/// Lets the main thread answer signals while it is blocked; does nothing on other threads.
const host::InterruptCheck& signal_check();

}  // namespace moe::bindings
