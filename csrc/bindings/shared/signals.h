#pragma once

#include <pybind11/pybind11.h>

#include "group/group.h"

namespace moe::bindings {

/// Lets the main thread answer signals while it is blocked; does nothing on other threads.
const group::InterruptCheck& signal_check();

/// Calls signal_check() and, where it is not None, @p check, which raises once the ranks have given
/// up what they make together. @p check outlives the result.
group::InterruptCheck interrupt_check_with(const pybind11::object& check);

/// Throws the Python error that a signal handler has set. Called with the GIL.
[[noreturn]] void throw_raised_by_signal();

}  // namespace moe::bindings
