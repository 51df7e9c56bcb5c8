#include "kernels/receive.h"

#include <algorithm>

#include "core/math.h"
#include "device/primitives.h"
#include "kernels/copied_rows.h"
#include "kernels/finish.h"

namespace moe::kernels {

namespace {

/// A block waits until the rows are here.
/// @param counts_waits  whether waits are counted, by one block of the rank: its threads wait for
///   the others
/// @return the same on every thread: false where the kernel is to leave, or nothing moves.
MOE_DEVICE bool await_rows(const ReceiveParams& params, bool counts_waits) {
  auto* const scratch = reinterpret_cast<int32_t*>(device::shared_memory());
  if (block_has_left(params.buffer, scratch) || device::load(params.tables.may_move) == 0)
    return false;
  return await_done(params.buffer, params.tables, params.operation, scratch, counts_waits);
}

// Grid: one block, whose threads wait for a rank each. Where rows are copied, any number of blocks:
//   each waits by itself for all ranks, and its warps take rows in turn.
// Protocol: the exchange of this operation filled the tables, and nothing has written them since. A
//   done flag is released by its rank when that has written its rows, or by the rank that
//   forwards them on this node; it is acquired here. Rows that are copied are this rank's own,
//   which no peer writes; so are their sources from then on. No other kernel waits for this one,
//   and no block for another: the kernel has ended when all copies are written.
// Example: 3 ranks, rank 1 sends no rows here: threads 0 and 2 wait for a flag each. Rank 2 is on
//   another device and has sent a token to row 4, of which row 9 is to be a copy; origins 4 and 4
//   stand beside them, and the warp that comes to row 9 copies row 4 there.
MOE_KERNEL void receive(const ReceiveParams params) {
  device::await_prerequisites();
  await_rows(params, true);
}

/// Apart, as ranks of one device need none of its registers.
template <bool kBulk>
MOE_KERNEL void receive_copies(const ReceiveParams params) {
  device::await_prerequisites();
  const bool counts_waits = device::block_idx() == 0;
  if (!await_rows(params, counts_waits))
    return;
  if constexpr (kBulk && device::kHasBulkCopies) {
    const CopyShape shape = CopyShape::make(params, device::num_threads());
    std::byte* const stages = device::shared_memory() + shape.scratch_bytes;
    copy_by_bulk_copies(params, shape, stages + device::warp_idx() * shape.warp_bytes);
  } else {
    copy_by_loads(params);
  }
}

}  // namespace

size_t receive_shared_bytes(const ReceiveParams& params, int num_threads) {
  return static_cast<size_t>(CopyShape::make(params, num_threads).shared_bytes(num_threads));
}

void launch_receive(const device::Launch& launch, const ReceiveParams& params) {
  device::Launch shape = launch;
  if (!params.arrangement.has_origins) {
    shape.num_blocks = 1;
    const auto num_waiting =
        static_cast<int>(round_up(params.buffer.num_ranks, int64_t{device::kWarpSize}));
    shape.num_threads = std::min(launch.num_threads, num_waiting);
  }
  shape.shared_bytes = receive_shared_bytes(params, shape.num_threads);
  if (!params.arrangement.has_origins)
    device::launch(&receive, shape, params);
  else if (CopyShape::make(params, shape.num_threads).is_bulk)
    device::launch(&receive_copies<true>, shape, params);
  else
    device::launch(&receive_copies<false>, shape, params);
}

}  // namespace moe::kernels
