#include "bindings/cuda/bind_device_heap.h"

#include "bindings/device/bind_strided_copies.h"
#include "bindings/shared/heap_stats.h"
#include "bindings/shared/make_tensor.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/without_gil.h"

namespace moe::bindings {

namespace {

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

/// Bytes of the device heap as a tensor of uint8; they go back once streams are done with them.
py::object empty_bytes(const DeviceHeap& self, uint64_t bytes) {
  auto window = without_gil([&] { return self.heap->allocate(bytes); });
  std::byte* data = window->data();
  constexpr int32_t kUint8 = 1 << 8 | 8;
  return make_tensor(std::move(window),
                     data,
                     {static_cast<int64_t>(bytes)},
                     kUint8,
                     {self.device->dlpack_type(), self.device->device_idx()});
}

}  // namespace

std::shared_ptr<DeviceHeap> create_device_heap(const NativeGroup& native,
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

void bind_devices(py::module_& module) {
  module.attr("ARCHITECTURES") = MOE_CUDA_ARCHS;
  module.attr("CUDA_VERSION") = CUDART_VERSION;
  module.def("driver_version", &cuda::driver_version);
  module.def("count_devices", &count_devices);
  module.def("describe_device", &describe_device, py::arg("device_idx"));
  module.def("can_reach", &cuda::can_reach, Signature("device_idx, peer_device_idx"));
}

DeviceHeapClass bind_device_heap(py::module_& module) {
  DeviceHeapClass heap(module, "Heap", py::module_local());
  heap.def_property_readonly("num_sms",
                             [](const DeviceHeap& self) { return self.device->num_sms(); })
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
          Signature("targets, sources, stream, num_sms=0"))
      .def("stats", [](const DeviceHeap& self) { return heap_stats_dict(self.heap->stats()); });
  return heap;
}

}  // namespace moe::bindings
