#include "kernels/internode_exchange.h"

#include "device/primitives.h"
#include "kernels/exchange_block.h"
#include "kernels/offers_block.h"
#include "kernels/rail_peers.h"

namespace moe::kernels {

namespace {

struct InternodeExchangeParams {
  ExchangeParams operation;
  Rails rails;
};

struct InternodeOffersParams {
  OffersParams operation;
  Rails rails;
};

// Grid: blocks that count; the warps of the last one share the remote nodes.
// Protocol: this rank's row is put along the rail, body and flag in one put, and stored to the
// ranks
//   of the node. Nothing before that waits for a rank of another node, so every row is on its way
//   whatever its readers do. Then each warp waits for rows of its nodes and stores them to the
//   ranks of this node, flag last; then the block waits until all rows are there, as within one
//   node.
// Example: 2 nodes of 2 ranks. Rank 1 gets its own row, that of rank 0 by its stores, that of rank
// 3
//   by its own hand from the rail region, and that of rank 2 from rank 0.
template <bool kHasReplicas>
MOE_KERNEL void internode_exchange(InternodeExchangeParams params) {
  const RailPeers peers(params.operation.buffer, params.rails);
  ExchangeBlock<RailPeers, kHasReplicas> block(params.operation, peers);
  if (block.count())
    block.run();
}

MOE_KERNEL void internode_offers(InternodeOffersParams params) {
  const RailPeers peers(params.operation.buffer, params.rails);
  OffersBlock<RailPeers>(params.operation, peers).run();
}

}  // namespace

void launch_internode_exchange(const device::Launch& launch,
                               const ExchangeParams& params,
                               const Rails& rails) {
  device::Launch shape = launch;
  shape.num_threads = num_threads_of(launch.num_threads);
  shape.num_blocks = num_exchange_blocks(launch.num_blocks, params);
  shape.shared_bytes = exchange_shared_bytes(params);
  const InternodeExchangeParams both{params, rails};
  if (has_replicas(params))
    device::launch(&internode_exchange<true>, shape, both);
  else
    device::launch(&internode_exchange<false>, shape, both);
}

void launch_internode_offers(const device::Launch& launch,
                             const OffersParams& params,
                             const Rails& rails) {
  device::Launch shape = launch;
  shape.num_threads = num_threads_of(launch.num_threads);
  shape.num_blocks = 1;
  shape.shared_bytes = kOffersSharedBytes;
  device::launch(internode_offers, shape, InternodeOffersParams{params, rails});
}

}  // namespace moe::kernels
