#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/cuda_stream.h"
#include "cuda/memory_pool.h"
#include "runtime/device.h"

namespace moe::cuda {

/// Facts about a device that are known without using it.
struct DeviceInfo {
  std::string name;
  int32_t compute_capability = 0;  ///< 10 * major + minor
  int32_t num_sms = 0;
  uint64_t memory_bytes = 0;
  std::string uuid;     ///< 16 bytes: the same in every process that sees the device
  std::string pci_bus;  ///< "0000:1B:00.0"
};

/// Number of devices, and why there are none: no driver, one that is too old, none visible.
int count_devices(std::string* reason);
/// @throws CudaError
DeviceInfo describe_device(int device_idx);
/// Returns whether kernels on one device reach memory of the other.
bool can_reach(int device_idx, int peer_device_idx);
/// Version of the driver, 13000 for 13.0; 0 where there is none.
int driver_version();

/// One NVIDIA GPU over the CUDA runtime; see `runtime::Device`.
class CudaDevice final : public runtime::Device {
 public:
  /// Makes the device's context and loads every kernel.
  /// @param max_connections  CUDA_DEVICE_MAX_CONNECTIONS as the process has it, 8 where it is not
  ///   set: streams beyond it wait for each other, and are refused. 0 where that may be.
  /// @throws CudaError  no driver, no such device, or no kernel was compiled for it.
  /// @throws InvalidArgument  as create_stream() does: callers have streams, too.
  static std::shared_ptr<CudaDevice> create(int device_idx, int max_connections);

  ~CudaDevice() override;

  int32_t dlpack_type() const override { return 2; }  // kDLCUDA
  int32_t device_idx() const override { return device_idx_; }
  Identity identity() const override;
  bool has_host_caller() const override { return false; }
  bool is_shared() const override { return max_connections_ != 0; }
  int num_sms() const override { return info_.num_sms; }
  size_t max_shared_bytes() const override { return max_shared_bytes_; }
  bool has_bulk_copies() const override { return architecture_ >= 90; }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override;
  std::shared_ptr<std::byte> allocate_unset(int64_t bytes) override;
  std::shared_ptr<std::byte> allocate_host(int64_t bytes) override;
  std::shared_ptr<const void> reserve(int64_t bytes, int64_t host_bytes) override;
  const std::byte* map_host(const void* memory,
                            int64_t bytes,
                            const std::shared_ptr<const void>& owner) override;
  /// @throws InvalidArgument  this process would use more streams of the device than connections.
  std::shared_ptr<runtime::Stream> create_stream() override;
  std::shared_ptr<runtime::Baton> create_baton() override {
    return std::make_shared<CudaBaton>(device_idx_);
  }
  std::shared_ptr<void> keep(std::shared_ptr<void> inputs) override { return inputs; }
  std::shared_ptr<runtime::Stream> side_stream() override { return pool_->side_stream(); }
  /// @param handle  torch.cuda.Stream.cuda_stream. The stream outlives this device.
  std::shared_ptr<runtime::Stream> caller_stream(uintptr_t handle) override;
  std::vector<std::shared_ptr<runtime::Stream>> caller_streams() override;

  void activate() override;
  std::shared_ptr<void> activate_for_now() override;

  const DeviceInfo& info() const { return info_; }
  MemoryPool& pool() const { return *pool_; }

 private:
  CudaDevice(int device_idx, int max_connections);

  int device_idx_;
  int max_connections_;
  DeviceInfo info_;
  std::shared_ptr<const void> caller_place_;  ///< place of the caller's stream among connections
  int architecture_;
  size_t max_shared_bytes_ = 0;
  std::shared_ptr<MemoryPool> pool_;
  std::mutex mutex_;
  std::map<uintptr_t, std::shared_ptr<CudaStream>> caller_streams_;
};

}  // namespace moe::cuda
