#pragma once

#include "kernels/exchange.h"
#include "kernels/internode.h"

namespace moe::kernels {

/// launch_exchange() across nodes: this rank's row goes to the ranks of its node by stores and
/// along its rail by puts; rows that come along the rail are written to the ranks of this node,
/// flag last. Tables::peers has addresses of windows of this node only: those that any rank of the
/// rail writes to (dispatch) or pulls from (combine).
void launch_internode_exchange(const device::Launch& launch,
                               const ExchangeParams& params,
                               const Rails& rails);

/// launch_offers() across nodes.
void launch_internode_offers(const device::Launch& launch,
                             const OffersParams& params,
                             const Rails& rails);

}  // namespace moe::kernels
