#pragma once

#include "group/group.h"

namespace moe::bindings {

/// Lets the main thread answer signals while it is blocked; does nothing on other threads.
const group::InterruptCheck& signal_check();

/// Throws the Python error that is set, which a handler of a signal raised. Called with the GIL.
[[noreturn]] void throw_raised_by_signal();

}  // namespace moe::bindings
