#pragma once

#include "ops/dispatch.h"
#include "runtime/device_endpoint.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// ops::dispatch() by kernels. Addresses in @p params are the device's.
///
/// Called by: one thread per rank, on every rank of the group, in the same order.
/// Synchronizes: returns when the rows have been exchanged and checked; where the caller is the
/// host also when this rank's rows are sent and all rows for it have arrived, else the caller's
/// stream waits for that.
/// @throws as ops::dispatch()
ops::DispatchOutcome dispatch(DeviceEndpoint& endpoint,
                              const ops::DispatchParams& params,
                              const group::InterruptCheck& interrupt_check);

/// Keeper of @p window, which the device may still use, and its rows' address: the window itself
/// or a copy of its first @p bytes outside the heap, made in the order of the stream.
std::shared_ptr<void> copy_out_window(DeviceEndpoint& endpoint,
                                      std::shared_ptr<Window> window,
                                      uint64_t bytes,
                                      ops::CopyOut mode,
                                      std::byte** data);

}  // namespace moe::runtime
