#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "runtime/device.h"

namespace moe::bindings {

/// Copies every tensor of @p sources to the one of @p targets at its place, element by element in
/// logical order. Returns when that is in the stream, or has happened where the host is the stream.
///
/// Tensors lie in the device's memory; a pair has one dtype and as many elements on both sides.
/// @throws InvalidArgument  they do not, a target holds an element twice, or lists differ in
/// length.
void strided_copies(runtime::Device& device,
                    const pybind11::list& targets,
                    const pybind11::list& sources,
                    uintptr_t stream,
                    int num_sms);

}  // namespace moe::bindings
