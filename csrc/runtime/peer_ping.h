#pragma once

#include <string>

#include "group/group.h"
#include "runtime/control_memory.h"
#include "runtime/device.h"

namespace moe::runtime {

/// Looks whether ranks on several devices reach each other's control areas, before anything else is
/// written there. Collective; what it leaves in this rank's area is to be zeroed.
/// @return text of what is wrong, or "".
std::string ping_peers(group::Group& group,
                       Device& device,
                       Stream& stream,
                       const ControlMemory& control,
                       const group::InterruptCheck& interrupt_check);

}  // namespace moe::runtime
