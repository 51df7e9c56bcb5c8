#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/shared/native_group.h"

namespace moe::bindings {

/// Adds to a group what pipelines over shared slots are made of: chunks and signals.
void bind_slots(pybind11::class_<NativeGroup, std::shared_ptr<NativeGroup>>& group);

}  // namespace moe::bindings
