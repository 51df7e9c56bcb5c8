#pragma once

#include "ops/exchange.h"
#include "ops/plan.h"

namespace moe::host {

/// The CPU as what moves rows, for the steps of operations (DispatchSteps, CombineSteps).
struct CpuEngine {
  using Endpoint = host::Endpoint;
  using Exchange = host::Exchange;
  using Plan = host::Plan;
};

}  // namespace moe::host
