#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/dispatch.h"
#include "ops/endpoint_base.h"
#include "runtime/buffer_memory.h"
#include "runtime/call_order.h"
#include "runtime/control_memory.h"
#include "runtime/device.h"
#include "runtime/device_watch.h"
#include "runtime/internode.h"
#include "runtime/launch_defaults.h"
#include "runtime/launcher.h"
#include "runtime/operation_ring.h"
#include "runtime/receive_phase.h"
#include "runtime/segment_bases.h"

namespace moe::runtime {

struct DeviceEndpointConfig {
  ops::EndpointConfig common;
  LaunchShape shape;
  InternodeConfig internode;
};

/// One buffer on one rank whose rows kernels move; see EndpointBase. It connects ranks, and holds
/// what their operations use, each a job of its own.
///
/// Its kernels share one stream, so that they run in the order of the operations. Peers write into
/// two control areas: one in the heap of the group, which the host reads (activity and closed flags
/// only), and one in the memory of the device, with the ring of rows and flags.
class DeviceEndpoint : public ops::EndpointBase {
 public:
  /// Collective.
  /// @param memory  The heap that kernels address; of the same communicator tree as @p group.
  /// @throws InvalidArgument  configurations differ; names both values, on every rank. Or ranks lie
  ///   on several nodes and @p config has nothing that reaches them.
  static std::shared_ptr<DeviceEndpoint> create(std::shared_ptr<group::Group> group,
                                                std::shared_ptr<SymmetricMemory> memory,
                                                std::shared_ptr<Device> device,
                                                DeviceEndpointConfig config,
                                                const group::InterruptCheck& interrupt_check);
  ~DeviceEndpoint() override;

  Device& device() const { return *device_; }
  const ControlMemory& control() const { return control_; }
  ControlMemory& control() { return control_; }
  OperationRing& operations() { return operations_; }
  CallOrder& order() { return order_; }
  const Launcher& launcher() const { return launcher_; }
  BufferMemory& buffer_memory() { return buffer_memory_; }
  OpenReceive& open_receive() { return open_receive_; }
  /// Makes kernels find what was allocated.
  SegmentBases& segments() { return *segments_; }

  SymmetricMemory& memory() const override { return *memory_; }
  std::shared_ptr<Window> take_window(uint64_t bytes, bool is_captured) override {
    return buffer_memory_.take_window(bytes, is_captured);
  }
  /// Makes it DeviceReplicas. Waits for no kernel.
  void balance_replicas(std::shared_ptr<const layout::Replicas> replicas) override;
  int32_t dlpack_device_type() const override { return device_->dlpack_type(); }
  int32_t device_idx() const override { return device_->device_idx(); }
  bool spans_devices() const override { return spans_devices_; }
  bool can_quantize(const layout::WireFormat& format, layout::ScaleFormat scale) const override {
    return kernels::can_quantize(format, scale);
  }
  bool is_idle() const override;
  void restart(uint64_t next_epoch) override;
  Epochs epochs() const override;
  ops::WaitStatistics wait_statistics() const override { return control_.wait_statistics(); }
  bool is_host_caller() const override { return device_->has_host_caller(); }
  std::shared_ptr<void> keep_inputs(std::shared_ptr<void> inputs) override {
    return device_->keep(std::move(inputs));
  }
  std::shared_ptr<const void> mark_caller() override { return order_.mark_caller(); }
  bool is_capturing() const override { return order_.is_capturing(); }
  bool has_graphs() const override { return order_.has_graphs(); }

 private:
  struct Announcement;

  DeviceEndpoint(std::shared_ptr<group::Group> group,
                 std::shared_ptr<SymmetricMemory> memory,
                 std::shared_ptr<Device> device,
                 DeviceEndpointConfig config);
  /// Takes room for the control area on the device.
  const Window& make_area();
  void connect_areas(const group::InterruptCheck& interrupt_check);
  std::vector<uint8_t> compare_devices(const std::vector<Announcement>& announced);
  std::vector<std::byte*> find_areas(const std::vector<Announcement>& announced,
                                     const group::InterruptCheck& interrupt_check);
  void connect_nodes(const group::InterruptCheck& interrupt_check);
  void check_windows(const std::vector<Announcement>& announced) const;
  void start_last_phase() override { open_receive_.start(); }
  void await_verdict(const group::InterruptCheck& interrupt_check) override;
  void end_device_operations() override;

  std::shared_ptr<SymmetricMemory> memory_;
  std::shared_ptr<Device> device_;
  InternodeConfig internode_config_;
  bool spans_devices_ = false;
  std::shared_ptr<std::byte> remote_area_;  ///< stands for that of every rank of another node
  std::unique_ptr<SegmentBases> segments_;
  ControlMemory control_;
  OperationRing operations_;
  DeviceWatch watch_;
  CallOrder order_;
  Launcher launcher_;
  BufferMemory buffer_memory_;
  OpenReceive open_receive_;
};

}  // namespace moe::runtime
