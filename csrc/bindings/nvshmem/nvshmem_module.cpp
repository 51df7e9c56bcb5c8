#include <memory>
#include <string>
#include <utility>

#include "bindings/cuda/bind_device_heap.h"
#include "bindings/device/internode_kernels.h"
#include "bindings/shared/errors.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/warnings.h"
#include "bindings/shared/without_gil.h"
#include "nvshmem/host_library.h"
#include "nvshmem/world.h"

namespace moe::bindings {

namespace {

using nvshmem::World;

/// A communicator's share of one GPU, and this process's place among NVSHMEM's.
struct InternodeHeap : DeviceHeap {
  std::shared_ptr<World> world;
};

std::shared_ptr<InternodeHeap> create_heap(const NativeGroup& native,
                                           int device_idx,
                                           int max_connections,
                                           uint64_t limit_bytes,
                                           bool poison,
                                           const std::string& unique_id) {
  const py::gil_scoped_release no_gil;
  const auto local = create_device_heap(native, device_idx, max_connections, limit_bytes, poison);
  auto made = std::make_shared<InternodeHeap>();
  made->device = local->device;
  made->heap = local->heap;
  made->world =
      World::create(made->device, native.group->rank_idx(), native.group->num_ranks(), unique_id);
  return made;
}

std::shared_ptr<runtime::DeviceEndpoint> create_endpoint(py::handle settings,
                                                         const InternodeHeap& heap,
                                                         int num_sms,
                                                         int num_threads,
                                                         int tokens_per_chunk) {
  runtime::DeviceEndpointConfig config =
      device_config_of(settings, {num_sms, num_threads, tokens_per_chunk});
  config.internode = internode_config_of(settings, heap.world);
  heap.device->activate();
  return create_device_endpoint(settings, heap.heap, heap.device, std::move(config));
}

void bind_library(py::module_& module) {
  module.attr("NVSHMEM_VERSION") = nvshmem::built_version().text();
  module.def(
      "load_host_library",
      [](const std::string& path) { return nvshmem::load_host_library(path).text(); },
      py::arg("path"));
  module.def("is_initialized", &World::exists);
  module.def("make_unique_id", [] {
    const auto id = without_gil([&] { return World::make_unique_id(); });
    return py::bytes(id);
  });
}

}  // namespace

}  // namespace moe::bindings

PYBIND11_MODULE(_nvshmem, module) {
  using namespace moe::bindings;
  module.doc() = "The GPU backend of moe_comm across nodes: what _cuda is, over NVSHMEM.";
  register_errors();
  bind_warnings(module);
  bind_devices(module);
  bind_library(module);
  const DeviceHeapClass base = bind_device_heap(module);
  py::class_<InternodeHeap, DeviceHeap, std::shared_ptr<InternodeHeap>>(
      module, "InternodeHeap", py::module_local())
      .def_static("create",
                  &create_heap,
                  Signature("group, device_idx, max_connections, limit_bytes, poison, unique_id"))
      .def_property_readonly("gpu_sharing",
                             [](const InternodeHeap& self) { return self.world->sharing(); });
  bind_device_endpoint(module).def_static(
      "create",
      &create_endpoint,
      Signature("settings, heap, num_sms, num_threads, tokens_per_chunk"));
}
