#pragma once

#include "kernels/finish.h"
#include "kernels/rail_peers.h"

namespace moe::kernels {

/// finish_rows() across nodes: every warp's puts have been delivered; done flags are also those of
/// the rail's other ranks, whose rows this rank has moved here. None is released where some warp
/// left.
MOE_DEVICE bool internode_finish_rows(const Buffer& buffer,
                                      const Tables& tables,
                                      const Rails& rails,
                                      int32_t* scratch) {
  device::quiet();
  return finish_rows(buffer, tables, scratch, [&](uint64_t epoch) {
    if (block_has_left(buffer, scratch))
      return false;
    release_rail_done(buffer, rails, epoch);
    return true;
  });
}

/// finish() across nodes.
MOE_DEVICE void internode_finish(const Buffer& buffer,
                                 const Tables& tables,
                                 const Rails& rails,
                                 layout::Operation operation,
                                 int32_t* scratch) {
  if (internode_finish_rows(buffer, tables, rails, scratch))
    await_done(buffer, tables, operation, scratch);
}

}  // namespace moe::kernels
