#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/device/bind_device_endpoint.h"
#include "bindings/device/bind_strided_copies.h"
#include "bindings/shared/dlpack.h"
#include "bindings/shared/errors.h"
#include "bindings/shared/warnings.h"
#include "cuda/cuda_device.h"
#include "cuda/cuda_heap.h"

namespace moe::bindings {

namespace {

/// A communicator's share of one GPU: the device, and memory on it that every rank addresses.
struct DeviceHeap {
  std::shared_ptr<cuda::CudaDevice> device;
  std::shared_ptr<cuda::CudaHeap> heap;
};

std::shared_ptr<DeviceHeap> create_heap(const NativeGroup& native,
                                        int device_idx,
                                        int max_connections,
                                        uint64_t limit_bytes,
                                        bool poison) {
  const py::gil_scoped_release no_gil;
  auto made = std::make_shared<DeviceHeap>();
  made->device = cuda::CudaDevice::create(device_idx, max_connections);
  made->heap = cuda::CudaHeap::create(
      native.mesh, made->device, heap::HeapOptions{limit_bytes, false, poison});
  return made;
}

std::shared_ptr<runtime::DeviceEndpoint> create_endpoint(
    const NativeGroup& native,
    const DeviceHeap& heap,
    int num_experts,
    int64_t num_max_tokens,
    std::vector<int32_t> expert_rank,
    int depth,
    std::vector<std::pair<std::string, std::string>> agreed,
    int num_sms,
    int num_threads,
    int tokens_per_chunk) {
  runtime::DeviceEndpointConfig config;
  config.common = endpoint_config_of(
      num_experts, num_max_tokens, std::move(expert_rank), depth, "", std::move(agreed));
  config.shape = {num_sms, num_threads, tokens_per_chunk};
  heap.device->activate();
  return create_device_endpoint(native, heap.heap, heap.device, std::move(config));
}

/// (number of devices, why there are none)
py::tuple count_devices() {
  std::string reason;
  const int count = cuda::count_devices(&reason);
  return py::make_tuple(count, reason);
}

py::dict describe_device(int device_idx) {
  const cuda::DeviceInfo info = cuda::describe_device(device_idx);
  py::dict values;
  values["name"] = info.name;
  values["compute_capability"] =
      py::make_tuple(info.compute_capability / 10, info.compute_capability % 10);
  values["num_sms"] = info.num_sms;
  values["memory_bytes"] = info.memory_bytes;
  values["uuid"] = py::bytes(info.uuid);
  values["pci_bus"] = info.pci_bus;
  return values;
}

/// Bytes of the device heap as a capsule, uint8; they go back once streams are done with them.
py::capsule empty_bytes(const DeviceHeap& self, uint64_t bytes) {
  std::shared_ptr<Window> window;
  {
    const py::gil_scoped_release no_gil;
    window = self.heap->allocate(bytes);
  }
  std::byte* data = window->data();
  constexpr int32_t kUint8 = 1 << 8 | 8;
  return make_dlpack(std::move(window),
                     data,
                     {static_cast<int64_t>(bytes)},
                     kUint8,
                     {self.device->dlpack_type(), self.device->device_idx()});
}

py::dict heap_stats(const DeviceHeap& self) {
  const heap::HeapStats stats = self.heap->stats();
  py::dict values;
  values["segment_bytes"] = stats.segment_bytes;
  values["resident_bytes"] = stats.resident_bytes;
  values["live_bytes"] = stats.live_bytes;
  values["quarantined_bytes"] = stats.quarantined_bytes;
  values["peak_live_bytes"] = stats.peak_live_bytes;
  values["num_segments"] = stats.num_segments;
  values["num_windows"] = stats.num_windows;
  values["num_allocations"] = stats.num_allocations;
  values["num_growths"] = stats.num_growths;
  values["huge_page_bytes"] = stats.huge_page_bytes;
  values["peer_segment_bytes"] = stats.peer_segment_bytes;
  return values;
}

void bind_heap(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<DeviceHeap, std::shared_ptr<DeviceHeap>>(module, "Heap", py::module_local())
      .def_static("create",
                  &create_heap,
                  py::arg("group"),
                  py::arg("device_idx"),
                  py::arg("max_connections"),
                  py::arg("limit_bytes"),
                  py::arg("poison"))
      .def_property_readonly("num_sms",
                             [](const DeviceHeap& self) { return self.device->num_sms(); })
      .def_property_readonly("has_bulk_copies",
                             [](const DeviceHeap& self) { return self.device->has_bulk_copies(); })
      .def_property_readonly("sharing", [](const DeviceHeap& self) { return self.heap->sharing(); })
      .def(
          "reserve",
          [](const DeviceHeap& self, uint64_t bytes) { self.heap->reserve(bytes); },
          py::arg("num_bytes"),
          NoGil())
      .def("empty", &empty_bytes, py::arg("num_bytes"))
      .def(
          "use_on",
          [](const DeviceHeap& self, uintptr_t stream) { self.device->caller_stream(stream); },
          py::arg("stream"))
      .def(
          "strided_copies",
          [](const DeviceHeap& self,
             const py::list& targets,
             const py::list& sources,
             uintptr_t stream,
             int num_sms) { strided_copies(*self.device, targets, sources, stream, num_sms); },
          py::arg("targets"),
          py::arg("sources"),
          py::arg("stream"),
          py::arg("num_sms") = 0)
      .def("stats", &heap_stats);
}

}  // namespace

}  // namespace moe::bindings

PYBIND11_MODULE(_cuda, module) {
  using namespace moe::bindings;
  module.doc() = "The GPU backend of moe_comm on NVIDIA GPUs: devices, their memory, kernels.";
  register_errors();
  bind_warnings(module);
  module.attr("ARCHITECTURES") = MOE_CUDA_ARCHS;
  module.attr("CUDA_VERSION") = CUDART_VERSION;
  module.def("driver_version", &moe::cuda::driver_version);
  module.def("count_devices", &count_devices);
  module.def("describe_device", &describe_device, pybind11::arg("device_idx"));
  module.def("can_reach",
             &moe::cuda::can_reach,
             pybind11::arg("device_idx"),
             pybind11::arg("peer_device_idx"));
  bind_heap(module);
  bind_device_endpoint(module).def_static("create", &create_endpoint);
}
