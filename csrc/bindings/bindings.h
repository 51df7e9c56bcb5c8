#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/shared/signals.h"

namespace moe::bindings {

void bind_kernels(pybind11::module_& module);
void bind_files(pybind11::module_& module);
void bind_heap(pybind11::module_& module);
void bind_group(pybind11::module_& module);
void bind_rail(pybind11::module_& module);
void bind_buffer(pybind11::module_& module);
void bind_layout(pybind11::module_& module);
void bind_internode(pybind11::module_& module);
void bind_batched_copy(pybind11::module_& module);
void bind_tensor_table(pybind11::module_& module);
void bind_routing_map(pybind11::module_& module);

}  // namespace moe::bindings
