#pragma once

#include "runtime/device_exchange.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// Kernels as what moves rows, for the steps of operations (ops::DispatchSteps, CombineSteps).
struct DeviceEngine {
  using Endpoint = DeviceEndpoint;
  using Exchange = DeviceExchange;
  using Plan = DevicePlan;
  static constexpr bool kReadsChoices = false;
};

}  // namespace moe::runtime
