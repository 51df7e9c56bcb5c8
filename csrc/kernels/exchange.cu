#include "kernels/exchange.h"

#include <algorithm>

#include "core/error.h"
#include "device/primitives.h"
#include "kernels/exchange_block.h"

namespace moe::kernels {

namespace {

template <bool kHasReplicas>
MOE_KERNEL void exchange_rows(ExchangeParams params) {
  const NodePeers peers(params.buffer);
  ExchangeBlock<NodePeers, kHasReplicas> block(params, peers);
  if (block.count())
    block.run();
}

}  // namespace

int num_exchange_blocks(int most_blocks, const ExchangeParams& params) {
  if (!counts_choices(params))
    return 1;
  return std::max(1, std::min(most_blocks, int{params.choices.num_chunks}));
}

size_t exchange_shared_bytes(const ExchangeParams& params) {
  const int num_ranks = params.buffer.num_ranks;
  const int num_slots = params.buffer.num_experts;
  int64_t bytes = ExchangeSharedMap::make(num_ranks, num_slots).bytes;
  if (has_replicas(params))
    bytes += ReplicaSharedMap::make(num_ranks, num_slots).bytes;
  return static_cast<size_t>(bytes);
}

void launch_exchange(const device::Launch& launch, const ExchangeParams& params) {
  MOE_CHECK(launch.num_threads <= kMaxExchangeThreads,
            "an exchange has at most ",
            kMaxExchangeThreads,
            " threads, got ",
            launch.num_threads);
  device::Launch shape = launch;
  shape.num_blocks = num_exchange_blocks(launch.num_blocks, params);
  shape.shared_bytes = exchange_shared_bytes(params);
  if (has_replicas(params))
    device::launch(&exchange_rows<true>, shape, params);
  else
    device::launch(&exchange_rows<false>, shape, params);
}

}  // namespace moe::kernels
