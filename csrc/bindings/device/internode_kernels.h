#pragma once

#include "runtime/internode.h"

namespace moe::bindings {

/// Those that this module is linked with; only for modules that are.
inline runtime::InternodeKernels internode_kernels() {
  return {&kernels::launch_internode_exchange,
          &kernels::launch_internode_offers,
          &kernels::launch_internode_dispatch,
          &kernels::internode_dispatch_shared_bytes,
          &kernels::internode_dispatch_bytes,
          &kernels::launch_internode_combine,
          &kernels::internode_combine_shared_bytes,
          &kernels::internode_combine_bytes};
}

}  // namespace moe::bindings
