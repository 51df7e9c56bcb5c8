#include "kernels/offers_block.h"

namespace moe::kernels {

namespace {

MOE_KERNEL void exchange_offers(OffersParams params) {
  const NodePeers peers(params.buffer);
  OffersBlock<NodePeers>(params, peers).run();
}

}  // namespace

void launch_offers(const device::Launch& launch, const OffersParams& params) {
  device::Launch shape = launch;
  shape.num_blocks = 1;
  shape.shared_bytes = kOffersSharedBytes;
  device::launch(exchange_offers, shape, params);
}

}  // namespace moe::kernels
