#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/device/bind_device_endpoint.h"
#include "cuda/cuda_device.h"
#include "cuda/cuda_heap.h"

namespace moe::bindings {

/// A communicator's share of one GPU: the device, and memory on it that every rank which reaches it
/// addresses.
struct DeviceHeap {
  std::shared_ptr<cuda::CudaDevice> device;
  std::shared_ptr<cuda::CudaHeap> heap;
};

using DeviceHeapClass = py::class_<DeviceHeap, std::shared_ptr<DeviceHeap>>;

/// @param limit_bytes  0 for no limit.
std::shared_ptr<DeviceHeap> create_device_heap(const NativeGroup& native,
                                               int device_idx,
                                               int max_connections,
                                               uint64_t limit_bytes,
                                               bool poison);

/// Binds what every module for GPUs says of itself and of devices.
void bind_devices(py::module_& module);

/// Adds Heap to @p module, known to no other; how one is created is the module's own matter.
DeviceHeapClass bind_device_heap(py::module_& module);

}  // namespace moe::bindings
