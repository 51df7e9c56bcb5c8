#pragma once

#include "ops/combine.h"
#include "ops/dispatch.h"
#include "runtime/device_endpoint.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

// Operations recorded into a graph. Nothing waits for the host when the graph runs: sizes are fixed
// by a capacity, epochs advance on the device, and a status word says afterwards what came of it.
//
// Every address is fixed too, so an operation has one window. It is offered again by the next run
// of the same operation, or of one that was captured once nobody had the result any more: both come
// in stream order behind everything that used it. What an operation needs belongs to the buffer
// from then on, because nobody tells when a graph is gone; see CapturedMemory.

/// Records a dispatch. The sizes of @p params' capacity are those of the result, and its plan
/// serves captured operations only.
///
/// Called by: every rank of the group, for the same operations in the same order as on all others,
/// and so are their graphs run. Talks to nobody.
/// @throws InvalidArgument  the routing would decide the size of the result.
/// @throws CapacityError    the heap cannot hold it.
ops::DispatchOutcome capture_dispatch(DeviceEndpoint& endpoint, const ops::DispatchParams& params);

/// Records a combine. Where the dispatch of its plan moved nothing in a run, so does this.
///
/// Called by: as capture_dispatch().
/// @throws CapacityError  the heap cannot hold the rows or the sums.
ops::CombineOutcome capture_combine(DeviceEndpoint& endpoint, const ops::CombineParams& params);

/// @throws InvalidArgument  the plan was made inside a capture.
void check_has_counts(const DevicePlan& plan);

}  // namespace moe::runtime
