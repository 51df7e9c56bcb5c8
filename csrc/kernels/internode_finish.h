#pragma once

#include "kernels/finish.h"
#include "kernels/rail_peers.h"

namespace moe::kernels {

/// Whether a kernel of the buffer left early, as all threads of the block see it alike while other
/// blocks of this kernel may leave. @param scratch  shared, a word
MOE_DEVICE bool block_has_left(const Buffer& buffer, int32_t* scratch) {
  if (device::thread_idx() == 0)
    device::store(scratch,
                  static_cast<int32_t>(
                      device::load_relaxed<device::Scope::kDevice>(&buffer.state->has_left)));
  device::sync_block();
  const bool has_left = device::load(scratch) != 0;
  device::sync_block();
  return has_left;
}

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
