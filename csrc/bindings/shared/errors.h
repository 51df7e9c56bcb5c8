#pragma once

namespace moe::bindings {

/// Exceptions of this module become those of moe_comm.errors, ValueError, TypeError and OSError.
void register_errors();

}  // namespace moe::bindings
