#pragma once

#include "device/launch.h"
#include "kernels/buffer.h"
#include "layout/row.h"

namespace moe::kernels {

struct ReceiveParams {
  Buffer buffer;
  Tables tables;
  layout::Operation operation = layout::Operation::kDispatch;  ///< or kCachedDispatch
};

/// Receives what launch_dispatch() of every rank sends here, within a node or across: waits for the
/// done flags of the ranks that have rows for this one, so that rows are whole for what follows in
/// the stream. Returns at once unless Tables::may_move, or where a kernel before it left.
///
/// Behind the dispatch of this rank, at any time before the next exchange of the buffer, which
/// writes the same tables. No peer waits for it. One block.
void launch_receive(const device::Launch& launch, const ReceiveParams& params);

}  // namespace moe::kernels
