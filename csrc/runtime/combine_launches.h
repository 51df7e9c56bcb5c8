#pragma once

#include "host/combine.h"
#include "kernels/combine.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// Launches what pulls and adds the rows of a combine, behind its exchange.
/// @param sums    [num_tokens, hidden]
/// @param pulled  [num_tokens, num_topk], where weights are pulled
void launch_sums(DeviceEndpoint& endpoint,
                 const host::CombineParams& params,
                 const kernels::Tables& tables,
                 std::byte* sums,
                 std::byte* pulled);

}  // namespace moe::runtime
