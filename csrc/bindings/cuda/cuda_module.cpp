#include <memory>

#include "bindings/cuda/bind_device_heap.h"
#include "bindings/shared/errors.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/warnings.h"

namespace moe::bindings {

namespace {

std::shared_ptr<runtime::DeviceEndpoint> create_endpoint(py::handle settings,
                                                         const DeviceHeap& heap,
                                                         int num_sms,
                                                         int num_threads,
                                                         int tokens_per_chunk) {
  heap.device->activate();
  return create_device_endpoint(
      settings,
      heap.heap,
      heap.device,
      device_config_of(settings, {num_sms, num_threads, tokens_per_chunk}));
}

}  // namespace

}  // namespace moe::bindings

PYBIND11_MODULE(_cuda, module) {
  using namespace moe::bindings;
  module.doc() = "The GPU backend of moe_comm on NVIDIA GPUs: devices, their memory, kernels.";
  register_errors();
  bind_warnings(module);
  bind_devices(module);
  bind_device_heap(module).def_static(
      "create",
      &create_device_heap,
      Signature("group, device_idx, max_connections, limit_bytes, poison"));
  bind_device_endpoint(module).def_static(
      "create",
      &create_endpoint,
      Signature("settings, heap, num_sms, num_threads, tokens_per_chunk"));
}
