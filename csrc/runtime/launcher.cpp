#include "runtime/launcher.h"

namespace moe::runtime {

Launcher::Launcher(const CallOrder& order, const ControlMemory& control, const LaunchShape& shape)
    : order_(order),
      device_(order.device()),
      control_(control),
      num_sms_(shape.num_sms > 0 ? shape.num_sms : device_.num_sms()),
      num_threads_(shape.num_threads),
      tokens_per_chunk_(shape.tokens_per_chunk > 0 ? shape.tokens_per_chunk
                                                   : kDefaultTokensPerChunk) {}

device::Launch Launcher::launch(int num_blocks, int usual_threads) const {
  device::Launch launch;
  launch.num_blocks = num_blocks;
  launch.num_threads = num_threads(usual_threads);
  launch.stream = order_.stream()->handle();
  return launch;
}

device::Launch Launcher::launch_behind(int num_blocks, int usual_threads) const {
  device::Launch behind = launch(num_blocks, usual_threads);
  behind.is_dependent = device_.has_bulk_copies();
  return behind;
}

void Launcher::exchange(const kernels::ExchangeParams& params) const {
  // Blocks take chunks in turn: more of them than run at a time only cost.
  const device::Launch shape = launch(kBlocksPerSm * device_.num_sms());
  if (internode_ == nullptr)
    kernels::launch_exchange(shape, params);
  else
    internode_->kernels().exchange(shape, params, internode_->rails());
}

void Launcher::offers(const kernels::OffersParams& params) const {
  if (internode_ == nullptr)
    kernels::launch_offers(launch(1), params);
  else
    internode_->kernels().offers(launch(1), params, internode_->rails());
}

void Launcher::receive(kernels::ReceiveParams params, bool is_behind) const {
  params.buffer = control_.buffer();
  device::Launch shape = is_behind ? launch_behind(num_sms_) : launch(num_sms_);
  fit_shared_memory(device_, shape, [&](int num_threads) {
    return kernels::receive_shared_bytes(params, num_threads);
  });
  kernels::launch_receive(shape, params);
}

}  // namespace moe::runtime
