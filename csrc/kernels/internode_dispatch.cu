#include "kernels/internode_dispatch.h"

#include "device/primitives.h"
#include "kernels/internode_finish.h"
#include "kernels/internode_rows.h"
#include "kernels/padding.h"

namespace moe::kernels {

namespace {

struct InternodeDispatchParams {
  DispatchParams operation;
  Rails rails;
};

MOE_HOST_DEVICE int64_t dispatch_scratch_bytes(int num_threads) {
  return round_up(num_threads / 32 * int64_t{4} + 4, 128);
}

// Grid: any number of blocks that can run at a time; every warp first sends, then forwards, chunks
//   in turn.
// Protocol: nothing waits before this rank's last chunk is on its way, so chunks come whatever
//   their readers do. An area of a peer is free: that peer's row of this epoch, which the exchange
//   acquired, was published after its kernels of earlier epochs had ended. Chunks arrive in any
//   order; each has a signal of its own. Done flags of remote ranks are raised at this node by
//   the rank that forwards their rows, once all blocks have counted themselves in finish_rows().
//   Rows are forwarded here and not in receive(): other ranks of the node wait for them, whenever
//   this one's caller asks for its own.
// Example: 2 nodes of 1 rank, chunks of 2 tokens, 3 tokens on rank 0: its warps put two chunks;
//   rank 1 waits for signals of chunks 0 and 1 of node 0, and writes each record to its slots.
template <typename Source>
MOE_KERNEL void internode_dispatch(const InternodeDispatchParams both) {
  const DispatchParams& params = both.operation;
  const Rails& rails = both.rails;
  if (device::load(params.tables.may_move) == 0)
    return;
  std::byte* const shared = device::shared_memory();
  auto* const scratch = reinterpret_cast<int32_t*>(shared);
  const bool has_left = block_has_left(params.buffer, scratch);
  ProgressReporter progress(params.buffer);
  const int64_t num_units = static_cast<int64_t>(device::num_blocks()) * device::num_warps();
  const int64_t own_unit =
      static_cast<int64_t>(device::warp_idx()) * device::num_blocks() + device::block_idx();
  if (!has_left) {
    const RailPacker<Source> packer(
        params,
        rails,
        shared + dispatch_scratch_bytes(device::num_threads()) +
            device::warp_idx() * RailWarpShape::make(params, rails).bytes);
    const int64_t num_chunks = rails.num_chunks(params.choices.num_tokens);
#pragma unroll 1
    for (int64_t chunk_idx = own_unit; chunk_idx < num_chunks; chunk_idx += num_units)
      packer.send(chunk_idx, &progress);
    Padding(params).zero();
    const RailForwarder forwarder(params, rails);
    const RailMemory rail(params.buffer, rails);
#pragma unroll 1
    for (int64_t chunk_idx = own_unit, goes_on = 1; goes_on != 0; chunk_idx += num_units) {
      goes_on = 0;
#pragma unroll 1
      for (int i = 0; i < rail.num_remote_nodes(); ++i) {
        const int src_node = rail.remote_node(i);
        if (!rail.is_active(rail.rank_of(src_node)) || chunk_idx >= forwarder.num_chunks(src_node))
          continue;
        goes_on = forwarder.forward(src_node, chunk_idx, &progress) ? 1 : 0;
        if (goes_on == 0)
          break;
      }
    }
  }
  internode_finish_rows(params.buffer, params.tables, rails, scratch);
}

}  // namespace

size_t internode_dispatch_shared_bytes(const DispatchParams& params,
                                       const Rails& rails,
                                       int num_threads) {
  num_threads = num_threads_of(num_threads);
  return static_cast<size_t>(dispatch_scratch_bytes(num_threads) +
                             num_threads / 32 * RailWarpShape::make(params, rails).bytes);
}

int64_t internode_dispatch_bytes(const DispatchParams& params, const Rails& rails) {
  return rails.num_chunks(params.choices.num_tokens) *
         rail_record(params, params.choices.num_topk).chunk_bytes(rails.tokens_per_chunk);
}

void launch_internode_dispatch(const device::Launch& launch,
                               const DispatchParams& params,
                               const Rails& rails) {
  check_area(rails, "dispatch", internode_dispatch_bytes(params, rails));
  const InternodeDispatchParams both{params, rails};
  device::Launch shape = launch;
  shape.num_threads = num_threads_of(launch.num_threads);
  with_source(params.quantize, [&]<typename Source>(Source) {
    device::launch(&internode_dispatch<Source>, shape, both);
  });
}

}  // namespace moe::kernels
