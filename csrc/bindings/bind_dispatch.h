#pragma once

#include "bindings/bindings.h"
#include "host/endpoint.h"

namespace moe::bindings {

/// Adds SubmittedDispatch to @p module, and dispatch() to @p endpoint.
void bind_dispatch(pybind11::module_& module,
                   pybind11::class_<host::Endpoint, std::shared_ptr<host::Endpoint>>& endpoint);

}  // namespace moe::bindings
