#pragma once

#include <memory>
#include <utility>

#include "bindings/shared/bind_endpoint.h"
#include "layout/token_sets.h"
#include "runtime/internode.h"

namespace moe::bindings {

/// Kernels that this module is linked with; only for modules that are.
inline runtime::InternodeKernels internode_kernels() {
  return {&kernels::launch_internode_exchange,
          &kernels::launch_internode_offers,
          &kernels::launch_internode_dispatch,
          &kernels::internode_dispatch_shared_bytes,
          &kernels::internode_dispatch_bytes,
          &kernels::launch_internode_combine,
          &kernels::internode_combine_shared_bytes,
          &kernels::internode_combine_bytes};
}

/// Configuration in @p settings (see endpoint_config_of()) of one that reaches other nodes through
/// @p regions.
inline runtime::InternodeConfig internode_config_of(
    py::handle settings, std::shared_ptr<runtime::SymmetricRegions> regions) {
  runtime::InternodeConfig config;
  config.regions = std::move(regions);
  config.kernels = internode_kernels();
  config.largest = {settings.attr("num_max_tokens").cast<int64_t>(),
                    settings.attr("num_max_topk").cast<int64_t>(),
                    settings.attr("max_row_bytes").cast<int64_t>(),
                    settings.attr("node_reduction").cast<bool>(),
                    settings.attr("balances_replicas").cast<bool>()
                        ? layout::most_shared_experts(settings.attr("num_experts").cast<int>())
                        : 0};
  return config;
}

}  // namespace moe::bindings
