#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/device.h"
#include "simt/stream.h"

namespace moe::simt {

/// Caller of operations on an emulated device, as far as streams go.
enum class Caller {
  kHost,     ///< the host itself, as with the CPU backend: what returns has ended
  kStreams,  ///< streams that run beside the host, as with CUDA
};

/// The emulator as a device: kernels run on fibers, memory is the process's own.
class SimtDevice final : public runtime::Device {
 public:
  static constexpr int kNumSms = 4;

  /// @param rank_idx  rank for reports of what kernels do wrong; -1 if there is one rank only.
  /// @param number  number of the device among those that ranks are placed on
  explicit SimtDevice(int rank_idx = -1,
                      Caller caller = Caller::kHost,
                      int num_sms = kNumSms,
                      int number = 0);
  ~SimtDevice() override;

  int32_t dlpack_type() const override;
  int32_t device_idx() const override { return 0; }  // as of tensors of the CPU
  Identity identity() const override;
  bool is_shared() const override { return false; }
  bool has_host_caller() const override { return caller_ == Caller::kHost; }

  int num_sms() const override { return num_sms_; }
  size_t max_shared_bytes() const override { return kMaxSharedBytes; }
  bool has_bulk_copies() const override { return true; }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override;
  std::shared_ptr<std::byte> allocate_unset(int64_t bytes) override;
  std::shared_ptr<std::byte> allocate_host(int64_t bytes) override;
  std::shared_ptr<const void> reserve(int64_t /*bytes*/, int64_t /*host_bytes*/) override {
    return nullptr;  // nothing waits here
  }
  const std::byte* map_host(const void* memory,
                            int64_t bytes,
                            const std::shared_ptr<const void>& owner) override;

  std::shared_ptr<void> keep(std::shared_ptr<void> inputs) override;

  std::shared_ptr<runtime::Stream> create_stream() override;
  std::shared_ptr<runtime::Baton> create_baton() override {
    return std::make_shared<StreamBaton>();
  }
  std::shared_ptr<runtime::Stream> side_stream() override { return host_stream_; }
  /// Handle of callers that are streams: of a WorkerStream, which lives at least until the call
  /// returns, or 0 for one of the device's own.
  /// @throws InvalidArgument  another stream; where the caller is the host, a handle other than 0.
  std::shared_ptr<runtime::Stream> caller_stream(uintptr_t handle) override;
  std::vector<std::shared_ptr<runtime::Stream>> caller_streams() override;
  /// The streams that were made or named here.
  const std::shared_ptr<StreamOrder>& order() const { return order_; }

  // Calls of each, for tests of what operations cost the host.
  int64_t num_zeroed_allocations() const { return num_zeroed_allocations_.load(); }
  int64_t num_unset_allocations() const { return num_unset_allocations_.load(); }
  int64_t num_host_allocations() const { return num_host_allocations_.load(); }

  void activate() override {}
  std::shared_ptr<void> activate_for_now() override { return nullptr; }

 private:
  const int rank_idx_;
  const Caller caller_;
  const int num_sms_;
  const int number_;
  std::shared_ptr<StreamOrder> order_;
  std::shared_ptr<HostStream> host_stream_;
  std::mutex mutex_;
  std::map<uintptr_t, std::shared_ptr<runtime::Stream>> caller_streams_;
  std::atomic<int64_t> num_zeroed_allocations_{0};
  std::atomic<int64_t> num_unset_allocations_{0};
  std::atomic<int64_t> num_host_allocations_{0};
};

}  // namespace moe::simt
