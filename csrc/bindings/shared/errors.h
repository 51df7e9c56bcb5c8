#pragma once

namespace moe::bindings {

/// Makes exceptions of this module those of moe_comm.errors, ValueError, TypeError and OSError.
void register_errors();

}  // namespace moe::bindings
