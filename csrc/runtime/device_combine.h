#pragma once

#include "kernels/combine.h"
#include "ops/combine.h"
#include "runtime/device_endpoint.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// ops::combine() by kernels; see dispatch(). @p params.plan is a DevicePlan.
ops::CombineOutcome combine(DeviceEndpoint& endpoint,
                            const ops::CombineParams& params,
                            const group::InterruptCheck& interrupt_check);

/// Launches, in the caller's stream, the local pass behind a combine that applied weights.
void weighted_gradient(DeviceEndpoint& endpoint, const kernels::WeightedGradientParams& params);

}  // namespace moe::runtime
