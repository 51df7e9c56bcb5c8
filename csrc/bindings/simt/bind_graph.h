#pragma once

#include "bindings/device/bind_device_endpoint.h"

namespace moe::bindings {

/// Adds Graph to @p module, and to endpoints what records one.
void bind_graph(py::module_& module, DeviceEndpointClass& endpoint);

}  // namespace moe::bindings
