#pragma once

#include "bindings/device/bind_device_endpoint.h"

namespace moe::bindings {

/// Adds Stream and Event to @p module, a caller's stream that runs beside the host, and Graph; to
/// endpoints what records one.
void bind_streams(py::module_& module, DeviceEndpointClass& endpoint);

}  // namespace moe::bindings
