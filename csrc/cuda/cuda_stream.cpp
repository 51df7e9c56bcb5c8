#include "cuda/cuda_stream.h"

#include <map>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "cuda/driver.h"

namespace moe::cuda {
namespace {

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t code = cudaStreamIsCapturing(stream, &status);
  // The default stream, while one that waits for it is captured: it may not be used either.
  if (code == cudaErrorStreamCaptureImplicit)
    return true;
  device::check_cuda(code, "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

bool has_ended(cudaEvent_t event) {
  const RelaxedCapture relaxed;
  const cudaError_t code = cudaEventQuery(event);
  if (code == cudaErrorNotReady)
    return false;
  device::check_cuda(code, "asking whether work has ended");
  return true;
}

cudaEvent_t make_event(int device_idx) {
  const CurrentDevice current(device_idx);
  cudaEvent_t event = nullptr;
  device::check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  return event;
}

/// Events that nobody looks at any more. Streams may still wait for what was recorded in them:
/// recording anew changes nothing there.
class SpareEvents {
 public:
  static SpareEvents& get() {
    static auto* instance = new SpareEvents;  // events end during exit
    return *instance;
  }

  /// @throws CudaError
  cudaEvent_t take(int device_idx) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<cudaEvent_t>& spare = by_device_[device_idx];
      if (!spare.empty()) {
        cudaEvent_t const event = spare.back();
        spare.pop_back();
        return event;
      }
    }
    return make_event(device_idx);
  }
  void give_back(int device_idx, cudaEvent_t event) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      by_device_[device_idx].push_back(event);
    } catch (...) {  // the machine has no memory to note it in
      cudaEventDestroy(event);
    }
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<cudaEvent_t>> by_device_;
};

}  // namespace

CudaEvent::CudaEvent(int device_idx, cudaStream_t stream, bool is_captured)
    : device_idx_(device_idx),
      event_(SpareEvents::get().take(device_idx)),
      is_captured_(is_captured) {
  const cudaError_t code = cudaEventRecord(event_, stream);
  if (code != cudaSuccess) {
    cudaEventDestroy(event_);
    device::throw_cuda_error(code, "recording an event");
  }
}

CudaEvent::~CudaEvent() {
  if (!is_captured_)
    SpareEvents::get().give_back(device_idx_, event_);
  else  // belongs to a graph
    cudaEventDestroy(event_);
}

bool CudaEvent::is_complete() const {
  return !is_captured_ && has_ended(event_);
}

CudaBaton::CudaBaton(int device_idx) : event_(make_event(device_idx)) {}

CudaBaton::~CudaBaton() {
  cudaEventDestroy(event_);  // who waits for it still does
}

bool CudaBaton::is_complete() const {
  return has_ended(event_);
}

CudaStream::CudaStream(int device_idx) : device_idx_(device_idx), is_own_(true) {
  const CurrentDevice current(device_idx);
  int lowest = 0;
  int highest = 0;
  device::check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                     "asking for the priorities of streams");
  device::check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest),
                     "making a stream");
}

CudaStream::CudaStream(int device_idx, uintptr_t handle)
    : device_idx_(device_idx), is_own_(false), stream_(reinterpret_cast<cudaStream_t>(handle)) {}

CudaStream::~CudaStream() {
  if (is_own_)  // what was put into it still runs
    cudaStreamDestroy(stream_);
}

std::shared_ptr<runtime::Event> CudaStream::record() {
  const auto current_device = current();
  return std::make_shared<CudaEvent>(device_idx_, stream_, is_captured(stream_));
}

std::shared_ptr<runtime::Event> CudaStream::record_uncaptured() {
  const auto current_device = current();
  return std::make_shared<CudaEvent>(device_idx_, stream_, false);
}

void CudaStream::wait(const runtime::Event& event) {
  const auto current_device = current();
  const auto& own = dynamic_cast<const CudaEvent&>(event);
  // Not as an event of outside (cudaEventWaitExternal): replays would look at it when it is gone.
  const cudaError_t code = cudaStreamWaitEvent(stream_, own.handle(), cudaEventWaitDefault);
  MOE_CHECK(code != cudaErrorStreamCaptureIsolation,
            "an event of outside a graph cannot be waited for while capturing");
  device::check_cuda(code, "making a stream wait for an event");
}

void CudaStream::take(runtime::Baton& baton) {
  const auto current_device = current();
  const unsigned flags = is_captured(stream_) ? cudaEventWaitExternal : cudaEventWaitDefault;
  device::check_cuda(
      cudaStreamWaitEvent(stream_, dynamic_cast<const CudaBaton&>(baton).event(), flags),
      "making a stream take its turn");
}

void CudaStream::give(runtime::Baton& baton) {
  const auto current_device = current();
  const unsigned flags = is_captured(stream_) ? cudaEventRecordExternal : cudaEventRecordDefault;
  device::check_cuda(
      cudaEventRecordWithFlags(dynamic_cast<const CudaBaton&>(baton).event(), stream_, flags),
      "making a stream hand on its turn");
}

void CudaStream::copy(void* target, const void* source, int64_t bytes) {
  if (bytes == 0)
    return;
  const auto current_device = current();
  const cudaError_t code =
      cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_);
  if (code != cudaSuccess)
    device::throw_cuda_error(code, concat("copying ", bytes, " bytes"));
}

void CudaStream::fill(void* target, int value, int64_t bytes) {
  if (bytes == 0)
    return;
  const auto current_device = current();
  const cudaError_t code = cudaMemsetAsync(target, value, static_cast<size_t>(bytes), stream_);
  if (code != cudaSuccess)
    device::throw_cuda_error(code, concat("filling ", bytes, " bytes"));
}

/// The names of default streams mean those of the current device.
std::optional<CurrentDevice> CudaStream::current() const {
  const bool is_default =
      reinterpret_cast<uintptr_t>(stream_) <= reinterpret_cast<uintptr_t>(cudaStreamPerThread);
  return is_default ? std::make_optional<CurrentDevice>(device_idx_) : std::nullopt;
}

bool CudaStream::is_capturing() const {
  const auto current_device = current();
  return is_captured(stream_);
}

bool CudaStream::is_idle() const {
  const auto current_device = current();
  const RelaxedCapture relaxed;
  if (is_captured(stream_))
    return false;
  const cudaError_t code = cudaStreamQuery(stream_);
  if (code == cudaErrorNotReady)
    return false;
  device::check_cuda(code, "asking whether a stream is idle");
  return true;
}

}  // namespace moe::cuda
