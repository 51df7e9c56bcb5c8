#pragma once

#include <pybind11/pybind11.h>

#include "group/group.h"

namespace moe::bindings {

/// Lets the main thread answer signals while it is blocked; does nothing on other threads.
const group::InterruptCheck& signal_check();

/// signal_check(), and @p check as often where it is not None: it raises once the ranks have given
/// up what they make together. @p check outlives it.
group::InterruptCheck interrupt_check_with(const pybind11::object& check);

/// Throws the Python error that is set, which a handler of a signal raised. Called with the GIL.
[[noreturn]] void throw_raised_by_signal();

}  // namespace moe::bindings
