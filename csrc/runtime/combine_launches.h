#pragma once

#include <string>

#include "kernels/combine.h"
#include "kernels/exchange.h"
#include "ops/combine.h"
#include "runtime/device_endpoint.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// Text of what is wrong with this combine for the memory between nodes, or "".
std::string find_shortage(DeviceEndpoint& endpoint, const ops::CombineParams& params);

/// This rank's row of the combine, but for where peers pull from.
kernels::ExchangeParams combine_row(const DeviceEndpoint& endpoint,
                                    const ops::CombineParams& params);

/// Bytes of the window that a rank offers where ops::adds_by_rank(): see layout::RankSumsMap.
int64_t rank_sums_bytes(const ops::CombineParams& params);

/// Launches what writes the requests of such a window, in front of the exchange. @return the
/// offer that peers are told.
Offer launch_requests(DeviceEndpoint& endpoint,
                      const ops::CombineParams& params,
                      const Window& window);

/// Launches what pulls and adds the rows of a combine, behind its exchange.
/// @param requests  the window of launch_requests(), or null
/// @param sums    [num_tokens, hidden]
/// @param pulled  [num_tokens, num_topk], where weights are pulled
void launch_sums(DeviceEndpoint& endpoint,
                 const ops::CombineParams& params,
                 const kernels::Tables& tables,
                 std::byte* requests,
                 std::byte* sums,
                 std::byte* pulled);

}  // namespace moe::runtime
