#include "cuda/cuda_device.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/error.h"
#include "cuda/driver.h"
#include "cuda/host_mapping.h"
#include "cuda/kernel_loading.h"

namespace moe::cuda {
namespace {

constexpr int kMostDevices = 64;
constexpr int kOtherStreams = 1;  ///< streams in which memory is zeroed

/// Streams of every device that its ranks, which are threads of a process, use there: those that
/// this module has made, and one from which each rank calls.
std::atomic<int>& num_streams(int device_idx) {
  static std::atomic<int> counts[kMostDevices];
  return counts[device_idx % kMostDevices];
}

/// A share in the count of streams.
class CountedStream {
 public:
  CountedStream(int device_idx, int max_connections) : device_idx_(device_idx) {
    const int count = num_streams(device_idx).fetch_add(1) + 1 + kOtherStreams;
    if (max_connections == 0 || count <= max_connections)
      return;
    num_streams(device_idx).fetch_sub(1);
    throw InvalidArgument(
        concat("this process uses ",
               count,
               " streams of device ",
               device_idx,
               " at least, and CUDA_DEVICE_MAX_CONNECTIONS allows ",
               max_connections,
               " to run side by side: one could wait for ever for another that waits behind it; "
               "set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process first uses CUDA"));
  }
  ~CountedStream() { num_streams(device_idx_).fetch_sub(1); }
  CountedStream(const CountedStream&) = delete;
  CountedStream& operator=(const CountedStream&) = delete;

 private:
  int device_idx_;
};

/// A stream of its own, of which the pool knows.
class WatchedStream {
 public:
  WatchedStream(int device_idx, int max_connections, std::shared_ptr<MemoryPool> pool)
      : place_(device_idx, max_connections),
        stream_(std::make_shared<CudaStream>(device_idx)),
        pool_(std::move(pool)) {
    pool_->watch(stream_);
  }
  ~WatchedStream() { pool_->unwatch(*stream_); }
  WatchedStream(const WatchedStream&) = delete;
  WatchedStream& operator=(const WatchedStream&) = delete;

  CudaStream& stream() const { return *stream_; }

 private:
  CountedStream place_;
  std::shared_ptr<CudaStream> stream_;
  std::shared_ptr<MemoryPool> pool_;
};

}  // namespace

int driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess)
    return 0;
  return version;
}

int count_devices(std::string* reason) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && count > 0)
    return count;
  cudaGetLastError();
  const int version = driver_version();
  if (version == 0)
    *reason = "no CUDA driver on this machine";
  else if (version < CUDART_VERSION / 1000 * 1000)
    *reason = concat("the CUDA driver is for CUDA ",
                     version / 1000,
                     ".",
                     version % 1000 / 10,
                     ", this module needs ",
                     CUDART_VERSION / 1000,
                     ".0 or later");
  else if (code != cudaSuccess)
    *reason = concat(cudaGetErrorName(code), ": ", cudaGetErrorString(code));
  else
    *reason = "the CUDA driver shows no device";
  return 0;
}

DeviceInfo describe_device(int device_idx) {
  cudaDeviceProp properties{};
  device::check_cuda(cudaGetDeviceProperties(&properties, device_idx), "asking about a device");
  DeviceInfo info;
  info.name = properties.name;
  info.compute_capability = 10 * properties.major + properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.memory_bytes = properties.totalGlobalMem;
  info.uuid.assign(properties.uuid.bytes, sizeof properties.uuid.bytes);
  char bus[32] = {};
  device::check_cuda(cudaDeviceGetPCIBusId(bus, sizeof bus, device_idx), "asking about a device");
  info.pci_bus = bus;
  return info;
}

bool can_reach(int device_idx, int peer_device_idx) {
  if (device_idx == peer_device_idx)
    return true;
  int can = 0;
  device::check_cuda(cudaDeviceCanAccessPeer(&can, device_idx, peer_device_idx),
                     "asking whether devices reach each other");
  return can != 0;
}

std::shared_ptr<CudaDevice> CudaDevice::create(int device_idx, int max_connections) {
  std::string reason;
  const int count = count_devices(&reason);
  if (count == 0)
    throw CudaError(reason, cudaErrorNoDevice);
  MOE_CHECK(device_idx >= 0 && device_idx < count,
            "device ",
            device_idx,
            " is not in [0, ",
            count,
            "), the devices that the CUDA driver shows");
  return std::shared_ptr<CudaDevice>(new CudaDevice(device_idx, max_connections));
}

CudaDevice::CudaDevice(int device_idx, int max_connections)
    : device_idx_(device_idx),
      max_connections_(max_connections),
      info_(describe_device(device_idx)),
      caller_place_(std::make_shared<CountedStream>(device_idx, max_connections)),
      architecture_(load_kernels(device_idx)),
      pool_(MemoryPool::of(device_idx)) {
  max_shared_bytes_ = static_cast<size_t>(
      device_attribute(device_idx, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
}

CudaDevice::~CudaDevice() = default;

runtime::Device::Identity CudaDevice::identity() const {
  Identity identity{};
  std::copy_n(info_.uuid.begin(), std::min(info_.uuid.size(), identity.size()), identity.begin());
  return identity;
}

std::shared_ptr<std::byte> CudaDevice::allocate(int64_t bytes) {
  return pool_->allocate(MemoryKind::kDevice, bytes, true);
}

std::shared_ptr<std::byte> CudaDevice::allocate_unset(int64_t bytes) {
  return pool_->allocate(MemoryKind::kDevice, bytes, false);
}

std::shared_ptr<std::byte> CudaDevice::allocate_host(int64_t bytes) {
  return pool_->allocate(MemoryKind::kHost, bytes, true);
}

std::shared_ptr<const void> CudaDevice::reserve(int64_t bytes, int64_t host_bytes) {
  using Reserved = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
  return std::make_shared<Reserved>(pool_->reserve(MemoryKind::kDevice, bytes),
                                    pool_->reserve(MemoryKind::kHost, host_bytes));
}

const std::byte* CudaDevice::map_host(const void* memory,
                                      int64_t bytes,
                                      const std::shared_ptr<const void>& owner) {
  const CurrentDevice current(device_idx_);
  return map_host_memory(memory, bytes, owner);
}

std::shared_ptr<runtime::Stream> CudaDevice::create_stream() {
  const auto watched = std::make_shared<WatchedStream>(device_idx_, max_connections_, pool_);
  return {watched, &watched->stream()};
}

std::shared_ptr<runtime::Stream> CudaDevice::caller_stream(uintptr_t handle) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<CudaStream>& stream = caller_streams_[handle];
  if (stream == nullptr) {
    stream = std::make_shared<CudaStream>(device_idx_, handle);
    pool_->watch(stream);
  }
  return stream;
}

std::vector<std::shared_ptr<runtime::Stream>> CudaDevice::caller_streams() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<runtime::Stream>> streams;
  for (const auto& [handle, stream] : caller_streams_)
    streams.push_back(stream);
  return streams;
}

void CudaDevice::activate() {
  device::check_cuda(cudaSetDevice(device_idx_), "making a device current");
}

std::shared_ptr<void> CudaDevice::activate_for_now() {
  return std::make_shared<CurrentDevice>(device_idx_);
}

}  // namespace moe::cuda
