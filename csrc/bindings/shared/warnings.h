#pragma once

#include <pybind11/pybind11.h>

namespace moe::bindings {

/// Warnings of this module go to Python's logger "moe_comm"; adds set_warning_interval().
void bind_warnings(pybind11::module_& module);

}  // namespace moe::bindings
