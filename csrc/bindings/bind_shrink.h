#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/shared/native_group.h"

namespace moe::bindings {

/// Adds to a group how its survivors leave it for a new one.
void bind_shrink(pybind11::class_<NativeGroup, std::shared_ptr<NativeGroup>>& group);

}  // namespace moe::bindings
