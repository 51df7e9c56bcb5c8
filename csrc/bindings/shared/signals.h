#pragma once

#include "group/group.h"

namespace moe::bindings {

/// Lets the main thread answer signals while it is blocked; does nothing on other threads.
const group::InterruptCheck& signal_check();

}  // namespace moe::bindings
