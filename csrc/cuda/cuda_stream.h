#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "cuda/driver.h"
#include "runtime/device.h"

namespace moe::cuda {

/// A recorded cudaEvent_t, of those that the process keeps for its devices: making one costs more
/// than recording it. An event recorded while its stream was captured belongs to the graph: it
/// never completes here.
class CudaEvent final : public runtime::Event {
 public:
  /// Records one in @p stream, of @p device_idx.
  /// @param is_captured  Whether the stream is.
  /// @throws CudaError
  CudaEvent(int device_idx, cudaStream_t stream, bool is_captured);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  /// @throws CudaError  what ran before it failed.
  bool is_complete() const override;
  cudaEvent_t handle() const { return event_; }
  bool is_captured() const { return is_captured_; }

 private:
  int device_idx_;
  cudaEvent_t event_ = nullptr;
  bool is_captured_ = false;
};

/// An event of its own, which graphs record and wait for as one of outside.
class CudaBaton final : public runtime::Baton {
 public:
  /// @throws CudaError
  explicit CudaBaton(int device_idx);
  ~CudaBaton() override;
  CudaBaton(const CudaBaton&) = delete;
  CudaBaton& operator=(const CudaBaton&) = delete;

  /// @throws CudaError  what ran before it failed.
  bool is_complete() const override;
  cudaEvent_t event() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaStream final : public runtime::Stream {
 public:
  /// A stream of its own, which does not wait for the default stream and goes before others, or the
  /// one that @p handle names, whose owner keeps it.
  explicit CudaStream(int device_idx);
  CudaStream(int device_idx, uintptr_t handle);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void* handle() const override { return stream_; }
  std::shared_ptr<runtime::Event> record() override;
  std::shared_ptr<runtime::Event> record_uncaptured() override;
  void wait(const runtime::Event& event) override;
  void take(runtime::Baton& baton) override;
  void give(runtime::Baton& baton) override;
  void copy(void* target, const void* source, int64_t bytes) override;
  void fill(void* target, int value, int64_t bytes) override;
  bool is_capturing() const override;
  bool is_idle() const override;

  bool is_own() const { return is_own_; }

 private:
  std::optional<CurrentDevice> current() const;

  int device_idx_;
  bool is_own_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace moe::cuda
