#pragma once

#include "device/kernel_modules.h"

// CUDA loads a kernel when it is first launched, which may wait until the device is idle: for ever,
// where the kernel of another rank on the same device waits for this one. So every file of kernels
// names itself here, and they are all loaded before the first operation. What a kernel may have of
// shared memory beyond 48 KiB is said there, too, once for each device.

namespace moe::device {
namespace {

__global__ void name_module() {}

const KernelModule this_module(reinterpret_cast<const void*>(&name_module));

}  // namespace
}  // namespace moe::device
