#pragma once

#include "host/combine.h"
#include "kernels/combine.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// host::combine() by kernels; see dispatch(). @p params.plan is a DevicePlan.
host::CombineOutcome combine(DeviceEndpoint& endpoint,
                             const host::CombineParams& params,
                             const host::InterruptCheck& interrupt_check);

/// Launches what pulls and adds the rows of a combine, behind its exchange.
/// @param sums    [num_tokens, hidden]
/// @param pulled  [num_tokens, num_topk], where weights are pulled
void launch_sums(DeviceEndpoint& endpoint,
                 const host::CombineParams& params,
                 const kernels::Tables& tables,
                 std::byte* sums,
                 std::byte* pulled);

/// Launches, in the caller's stream, the local pass behind a combine that applied weights.
void weighted_gradient(DeviceEndpoint& endpoint, const kernels::WeightedGradientParams& params);

}  // namespace moe::runtime
