#include "kernels/dispatch.h"

#include <algorithm>
#include <bit>

#include "device/primitives.h"
#include "kernels/dispatch_rows.h"
#include "kernels/finish.h"
#include "kernels/padding.h"

namespace moe::kernels {

namespace {

// Grid: any number of blocks. Warps take tokens in turn (several warps a row where tokens are few),
//   then rows of padding.
// Protocol: the exchange kernel before this one acquired the control rows of every peer, which hand
//   their windows to this rank. This kernel writes rows, weights and scale factors there;
//   finish_rows() counts the blocks, and its done flags hand the windows back. Nothing here waits
//   for a peer, so no warp stops midway: after an abort, rows go to memory that is kept for them.
//   Rows that peers write here are complete after the kernel receive().
// Example: 1 warp, tokens 0 and 1 with slots [a, b] and [none, c], rows of one piece. Row 0 is
//   loaded into stage 0; the slots of token 1 are found and row 1 is loaded into stage 1 while row
//   0 is stored to a and b; row 1 is stored to c.
template <typename Source, bool kBulk>
MOE_KERNEL void dispatch(const DispatchParams params) {
  device::await_prerequisites();
  if (has_left(params.buffer) || device::load(params.tables.may_move) == 0)
    return;
  const DispatchShape shape = DispatchShape::make(params, device::num_threads());
  std::byte* const shared = device::shared_memory();
  const WarpMemory memory{shared + shape.scratch_bytes + device::warp_idx() * shape.warp_bytes,
                          shape};
  if constexpr (kBulk && device::kHasBulkCopies)
    move_by_bulk_copies<Source>(params, memory);
  else
    move_by_loads<Source>(params, memory);
  Padding(params).zero();
  // Where receive() copies rows it takes as many SMs again: not before these are about to be free.
  device::launch_dependents();
  finish_rows(params.buffer, params.tables, reinterpret_cast<int32_t*>(shared));
}

}  // namespace

bool can_quantize(const layout::WireFormat& format, layout::ScaleFormat scale) {
  return format.is_e4m3(scale) && std::has_single_bit(static_cast<uint32_t>(format.block)) &&
         format.block >= device::kLaneElements && format.block <= device::kWarpElements;
}

int num_row_parts(const device::Launch& launch, const DispatchParams& params) {
  // A part with fewer bytes is not worth a warp. Quantized rows: DispatchShape::kPartElements.
  constexpr int64_t kLeastBytes = 512;
  if (params.choices.num_tokens == 0)
    return 1;
  const int64_t num_warps = int64_t{launch.num_blocks} * (launch.num_threads / device::kWarpSize);
  const int64_t least_bytes =
      params.quantize.is_on
          ? DispatchShape::kPartElements * int64_t{element_bytes(params.quantize.dtype)}
          : kLeastBytes;
  const int64_t num_parts =
      std::min(num_warps / params.choices.num_tokens, params.source_row_bytes / least_bytes);
  return static_cast<int>(std::max<int64_t>(num_parts, 1));
}

size_t dispatch_shared_bytes(const DispatchParams& params, int num_threads) {
  return static_cast<size_t>(DispatchShape::make(params, num_threads).shared_bytes(num_threads));
}

void launch_dispatch(const device::Launch& launch, const DispatchParams& params) {
  with_source(params.quantize, [&]<typename Source>(Source) {
    if (DispatchShape::make(params, launch.num_threads).is_bulk)
      device::launch(&dispatch<Source, true>, launch, params);
    else
      device::launch(&dispatch<Source, false>, launch, params);
  });
}

}  // namespace moe::kernels
