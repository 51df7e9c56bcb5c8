#include "simt/simt_device.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "core/error.h"

namespace moe::simt {
namespace {

constexpr std::align_val_t kAlignment{256};
constexpr int32_t kDlpackCpu = 1;
// No count, index or slot that makes sense: a kernel that reads what nobody wrote fails.
constexpr int kUnset = 0x5A;

/// @p owned, which goes when the streams of @p order have ended what they hold by the time that its
/// last owner is gone.
template <typename T>
std::shared_ptr<T> in_order_of(const std::shared_ptr<StreamOrder>& order,
                               std::shared_ptr<T> owned) {
  T* const address = owned.get();
  return {address, [order, owned = std::move(owned)](T*) mutable {
            const std::shared_ptr<const void> dropped = std::move(owned);
            order->drop(dropped);
          }};
}

std::shared_ptr<std::byte> allocate(const std::shared_ptr<StreamOrder>& order,
                                    int64_t bytes,
                                    int value) {
  MOE_CHECK(bytes >= 0, "device memory of ", bytes, " bytes");
  const size_t size = std::max<size_t>(static_cast<size_t>(bytes), 1);
  const std::shared_ptr<std::byte> memory(
      static_cast<std::byte*>(::operator new(size, kAlignment)),
      [](std::byte* owned) { ::operator delete(owned, kAlignment); });
  std::memset(memory.get(), value, size);
  return in_order_of(order, memory);
}

}  // namespace

SimtDevice::SimtDevice(int rank_idx, Caller caller, int num_sms, int number)
    : rank_idx_(rank_idx),
      caller_(caller),
      num_sms_(num_sms),
      number_(number),
      order_(std::make_shared<StreamOrder>()),
      host_stream_(std::make_shared<HostStream>(rank_idx)) {
  MOE_CHECK(num_sms >= 1, "a device of ", num_sms, " SMs");
}

SimtDevice::~SimtDevice() = default;

runtime::Device::Identity SimtDevice::identity() const {
  Identity identity{};
  std::memcpy(identity.data(), &number_, sizeof(number_));
  return identity;
}

int32_t SimtDevice::dlpack_type() const {
  return kDlpackCpu;
}

std::shared_ptr<std::byte> SimtDevice::allocate(int64_t bytes) {
  num_zeroed_allocations_.fetch_add(1, std::memory_order_relaxed);
  return simt::allocate(order_, bytes, 0);
}

std::shared_ptr<std::byte> SimtDevice::allocate_unset(int64_t bytes) {
  num_unset_allocations_.fetch_add(1, std::memory_order_relaxed);
  return simt::allocate(order_, bytes, kUnset);
}

std::shared_ptr<std::byte> SimtDevice::allocate_host(int64_t bytes) {
  num_host_allocations_.fetch_add(1, std::memory_order_relaxed);
  return simt::allocate(order_, bytes, 0);
}

std::shared_ptr<void> SimtDevice::keep(std::shared_ptr<void> inputs) {
  return has_host_caller() ? inputs : in_order_of(order_, std::move(inputs));
}

const std::byte* SimtDevice::map_host(const void* memory,
                                      int64_t /*bytes*/,
                                      const std::shared_ptr<const void>& /*owner*/) {
  return static_cast<const std::byte*>(memory);  // the process's own address
}

std::shared_ptr<runtime::Stream> SimtDevice::create_stream() {
  auto stream = std::make_shared<WorkerStream>(rank_idx_);
  order_->watch(stream->progress());
  return stream;
}

std::shared_ptr<runtime::Stream> SimtDevice::caller_stream(uintptr_t handle) {
  if (has_host_caller()) {
    MOE_CHECK(handle == 0, "the emulator's caller has stream 0 only, the host's; got ", handle);
    return host_stream_;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<runtime::Stream>& stream = caller_streams_[handle];
  if (stream == nullptr && handle == 0)
    stream = create_stream();
  if (stream == nullptr) {
    const auto named = std::dynamic_pointer_cast<WorkerStream>(
        DeviceStream::of_handle(reinterpret_cast<void*>(handle)));
    MOE_CHECK(named != nullptr, "a caller's stream runs beside the host; got ", handle);
    order_->watch(named->progress());
    stream = named;
  }
  return stream;
}

std::vector<std::shared_ptr<runtime::Stream>> SimtDevice::caller_streams() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<runtime::Stream>> streams;
  for (const auto& [handle, stream] : caller_streams_)
    streams.push_back(stream);
  return streams;
}

}  // namespace moe::simt
