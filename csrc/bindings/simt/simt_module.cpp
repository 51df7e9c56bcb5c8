#include <memory>
#include <utility>

#include "bindings/device/bind_device_endpoint.h"
#include "bindings/device/bind_strided_copies.h"
#include "bindings/device/internode_kernels.h"
#include "bindings/shared/errors.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/warnings.h"
#include "bindings/simt/bind_streams.h"
#include "simt/shared_regions.h"
#include "simt/simt_device.h"
#include "simt/stream_heap.h"

namespace moe::bindings {

namespace {

std::shared_ptr<runtime::DeviceEndpoint> create_endpoint(py::handle settings,
                                                         int num_sms,
                                                         int num_threads,
                                                         int tokens_per_chunk,
                                                         bool has_stream_callers,
                                                         int device_number) {
  const auto group = native_group_of(settings)->group;
  runtime::DeviceEndpointConfig config =
      device_config_of(settings, {num_sms, num_threads, tokens_per_chunk});
  config.internode = internode_config_of(settings, simt::make_shared_regions());
  const auto device = std::make_shared<simt::SimtDevice>(
      group->rank_idx(),
      has_stream_callers ? simt::Caller::kStreams : simt::Caller::kHost,
      simt::SimtDevice::kNumSms,
      device_number);
  // Emulated kernels reach whatever this process has mapped: the heap of the CPU backend.
  std::shared_ptr<SymmetricMemory> memory = group->shared_memory();
  if (has_stream_callers)
    memory = simt::make_stream_heap(std::move(memory), device->order());
  return create_device_endpoint(settings, std::move(memory), device, std::move(config));
}

}  // namespace

}  // namespace moe::bindings

PYBIND11_MODULE(_simt, module) {
  using namespace moe::bindings;
  module.doc() = "The GPU backend of moe_comm on an emulator: its kernels run on CPU fibers.";
  register_errors();
  bind_warnings(module);
  DeviceEndpointClass endpoint = bind_device_endpoint(module);
  endpoint.def_static("create",
                      &create_endpoint,
                      Signature("settings, num_sms, num_threads, tokens_per_chunk, "
                                "has_stream_callers, device_number"));
  bind_streams(module, endpoint);
  module.def(
      "strided_copies",
      [](const pybind11::list& targets, const pybind11::list& sources, int num_sms) {
        moe::simt::SimtDevice device;
        strided_copies(device, targets, sources, 0, num_sms);
      },
      Signature("targets, sources, num_sms=0"));
}
