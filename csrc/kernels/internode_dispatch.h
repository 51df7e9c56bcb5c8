#pragma once

#include "kernels/dispatch.h"
#include "kernels/internode.h"

namespace moe::kernels {

/// launch_dispatch() across nodes. A row goes to slots of this node by stores, and once to each
/// other node that has slots of it: packed into chunks, put to the rank of this rail there, which
/// writes it to its slots. Done flags of remote ranks are released by the rank that forwards their
/// rows. It ends when this rank has forwarded what came along its rail, and waits for that alone.
///
/// Blocks have at most kMaxInternodeThreads threads; all of them must be able to run at a time.
/// `is_plain` is not looked at: there are no bulk copies. An area (Rails::map) must have
/// internode_dispatch_bytes() of every rank.
void launch_internode_dispatch(const device::Launch& launch,
                               const DispatchParams& params,
                               const Rails& rails);
/// Shared memory of a block of @p num_threads.
size_t internode_dispatch_shared_bytes(const DispatchParams& params,
                                       const Rails& rails,
                                       int num_threads);
/// Bytes of an area that the rows of this rank take; at most Rails::map.num_max_chunks chunks.
int64_t internode_dispatch_bytes(const DispatchParams& params, const Rails& rails);

}  // namespace moe::kernels
