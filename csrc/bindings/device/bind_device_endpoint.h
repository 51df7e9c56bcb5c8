#pragma once

#include <memory>

#include "bindings/shared/bind_endpoint.h"
#include "runtime/device_endpoint.h"

namespace moe::bindings {

using DeviceEndpointClass =
    py::class_<runtime::DeviceEndpoint, std::shared_ptr<runtime::DeviceEndpoint>>;

/// Adds Plan and Endpoint to @p module, known to no other; how an endpoint is created is the
/// module's own matter.
DeviceEndpointClass bind_device_endpoint(py::module_& module);

/// Configuration in @p settings (see endpoint_config_of()) of an endpoint that reaches one node.
runtime::DeviceEndpointConfig device_config_of(py::handle settings, runtime::LaunchShape shape);

/// Collective; see DeviceEndpoint::create(). Called with the GIL.
std::shared_ptr<runtime::DeviceEndpoint> create_device_endpoint(
    py::handle settings,
    std::shared_ptr<SymmetricMemory> memory,
    std::shared_ptr<runtime::Device> device,
    runtime::DeviceEndpointConfig config);

}  // namespace moe::bindings
