#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/cuda/bind_device_heap.h"
#include "bindings/shared/errors.h"
#include "bindings/shared/warnings.h"

namespace moe::bindings {

namespace {

std::shared_ptr<runtime::DeviceEndpoint> create_endpoint(
    const NativeGroup& native,
    const DeviceHeap& heap,
    int num_experts,
    int64_t num_max_tokens,
    std::vector<int32_t> expert_rank,
    int depth,
    bool node_reduction,
    std::vector<std::pair<std::string, std::string>> agreed,
    int num_sms,
    int num_threads,
    int tokens_per_chunk) {
  runtime::DeviceEndpointConfig config;
  config.common = endpoint_config_of(num_experts,
                                     num_max_tokens,
                                     std::move(expert_rank),
                                     depth,
                                     node_reduction,
                                     "",
                                     std::move(agreed));
  config.shape = {num_sms, num_threads, tokens_per_chunk};
  heap.device->activate();
  return create_device_endpoint(native, heap.heap, heap.device, std::move(config));
}

}  // namespace

}  // namespace moe::bindings

PYBIND11_MODULE(_cuda, module) {
  using namespace moe::bindings;
  module.doc() = "The GPU backend of moe_comm on NVIDIA GPUs: devices, their memory, kernels.";
  register_errors();
  bind_warnings(module);
  bind_devices(module);
  bind_device_heap(module).def_static("create",
                                      &create_device_heap,
                                      pybind11::arg("group"),
                                      pybind11::arg("device_idx"),
                                      pybind11::arg("max_connections"),
                                      pybind11::arg("limit_bytes"),
                                      pybind11::arg("poison"));
  bind_device_endpoint(module).def_static("create", &create_endpoint);
}
