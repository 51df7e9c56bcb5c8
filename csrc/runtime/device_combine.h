#pragma once

#include "host/combine.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// host::combine() by kernels; see dispatch(). @p params.plan is a DevicePlan.
host::CombineOutcome combine(DeviceEndpoint& endpoint,
                             const host::CombineParams& params,
                             const host::InterruptCheck& interrupt_check);

}  // namespace moe::runtime
