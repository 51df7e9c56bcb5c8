#pragma once

#include "ops/dispatch.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// host::dispatch() by kernels. Addresses in @p params are the device's.
///
/// Called by: one thread per rank, on every rank of the group, in the same order.
/// Synchronizes: returns when the rows have been exchanged and checked; where the caller is the
/// host also when this rank's rows are sent and all rows for it have arrived, else the caller's
/// stream waits for that.
/// @throws as host::dispatch()
host::DispatchOutcome dispatch(DeviceEndpoint& endpoint,
                               const host::DispatchParams& params,
                               const host::InterruptCheck& interrupt_check);

/// What keeps @p window, which the device may still use, and its rows' address: the window itself
/// or a copy of its first @p bytes outside the heap, made in the order of the stream.
std::shared_ptr<void> copy_out_window(DeviceEndpoint& endpoint,
                                      std::shared_ptr<Window> window,
                                      uint64_t bytes,
                                      host::CopyOut mode,
                                      std::byte** data);

}  // namespace moe::runtime
