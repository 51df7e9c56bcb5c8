#pragma once

#include <cstdint>

#include "device/launch.h"
#include "kernels/buffer.h"
#include "layout/routing.h"
#include "layout/row.h"

namespace moe::kernels {

struct ReceiveParams {
  Buffer buffer;
  Tables tables;
  layout::Operation operation = layout::Operation::kDispatch;  ///< or kCachedDispatch
  layout::Arrangement arrangement;
  int64_t row_bytes = 0;  ///< on the wire
  int32_t is_plain = 0;   ///< loads and stores instead of bulk copies
};

/// Receives what launch_dispatch() of every rank sends here, within a node or across: waits for the
/// done flags of the ranks that have rows for this one, and copies rows that came once to the other
/// slots of their tokens (Arrangement::has_origins), so that all rows are whole for what follows in
/// the stream. Returns at once unless Tables::may_move, or where a kernel before it left.
///
/// Behind the dispatch of this rank, at any time before the next exchange of the buffer, which
/// writes the same tables. No peer waits for it.
/// @param launch  num_blocks is the number of SMs that may copy; one block where nothing is copied.
void launch_receive(const device::Launch& launch, const ReceiveParams& params);
/// Shared memory of a block of @p num_threads for rows of that size.
size_t receive_shared_bytes(const ReceiveParams& params, int num_threads);

}  // namespace moe::kernels
