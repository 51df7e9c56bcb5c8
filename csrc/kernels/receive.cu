#include "kernels/receive.h"

#include <algorithm>

#include "core/math.h"
#include "device/primitives.h"
#include "kernels/finish.h"

namespace moe::kernels {

namespace {

// Grid: one block; a thread waits for a rank at a time.
// Protocol: the exchange of this operation filled the tables, and nothing has written them since. A
//   done flag is released by its rank when that has written its rows, or by the rank that
//   forwards them on this node; it is acquired here. No other kernel waits for this one.
// Example: 3 ranks, rank 1 sends no rows here: threads 0 and 2 wait for a flag each.
MOE_KERNEL void receive(const ReceiveParams params) {
  if (has_left(params.buffer) || device::load(params.tables.may_move) == 0)
    return;
  await_done(params.buffer,
             params.tables,
             params.operation,
             reinterpret_cast<int32_t*>(device::shared_memory()));
}

}  // namespace

void launch_receive(const device::Launch& launch, const ReceiveParams& params) {
  device::Launch shape = launch;
  shape.num_blocks = 1;
  const auto num_waiting =
      static_cast<int>(round_up(params.buffer.num_ranks, int64_t{device::kWarpSize}));
  shape.num_threads = std::min(launch.num_threads, num_waiting);
  shape.shared_bytes = static_cast<size_t>(shape.num_threads / device::kWarpSize) * sizeof(int32_t);
  device::launch(receive, shape, params);
}

}  // namespace moe::kernels
