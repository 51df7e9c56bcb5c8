#pragma once

#include <pybind11/pybind11.h>

#include "group/group.h"

namespace moe::bindings {

/// signal_check(), and @p check as often where it is not None: it raises once the ranks have given
/// up what they make together. @p check outlives it.
group::InterruptCheck interrupt_check_with(const pybind11::object& check);

}  // namespace moe::bindings
