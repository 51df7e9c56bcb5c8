#pragma once

#include "ops/exchange.h"
#include "ops/plan.h"

namespace moe::ops {

/// The CPU as what moves rows, for the steps of operations (DispatchSteps, CombineSteps).
struct CpuEngine {
  using Endpoint = ops::Endpoint;
  using Exchange = ops::Exchange;
  using Plan = ops::Plan;
  /// The host reads choices; else kernels choose replicas.
  static constexpr bool kReadsChoices = true;
};

}  // namespace moe::ops
