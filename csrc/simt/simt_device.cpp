#include "simt/simt_device.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/error.h"

namespace moe::simt {
namespace {

constexpr std::align_val_t kAlignment{256};
constexpr int32_t kDlpackCpu = 1;
// No count, index or slot that makes sense: whoever reads what nobody wrote finds out.
constexpr int kUnset = 0x5A;

void free_memory(std::byte* memory) {
  ::operator delete(memory, kAlignment);
}

}  // namespace

class DeviceMemory {
 public:
  ~DeviceMemory() {
    // Nobody is left who could put work into a stream, and streams end their work before they go.
    for (const Retired& retired : retired_)
      free_memory(retired.memory);
  }

  static std::shared_ptr<std::byte> allocate(const std::shared_ptr<DeviceMemory>& self,
                                             int64_t bytes,
                                             int value) {
    MOE_CHECK(bytes >= 0, "device memory of ", bytes, " bytes");
    const size_t size = std::max<size_t>(static_cast<size_t>(bytes), 1);
    auto* const memory = static_cast<std::byte*>(::operator new(size, kAlignment));
    std::memset(memory, value, size);
    return {memory, [self](std::byte* owned) { self->retire(owned); }};
  }

  void watch(const std::shared_ptr<Progress>& progress) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(streams_, [](const auto& stream) { return stream.expired(); });
    streams_.push_back(progress);
  }

  /// Frees what no stream uses any more.
  void sweep() {
    if (num_retired_.load(std::memory_order_relaxed) == 0)
      return;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_free = [](const Retired& retired) {
      return std::all_of(retired.users.begin(), retired.users.end(), [](const User& user) {
        return user.progress->has_ended(user.number);
      });
    };
    std::erase_if(retired_, [&](const Retired& retired) {
      if (!is_free(retired))
        return false;
      free_memory(retired.memory);
      return true;
    });
    num_retired_.store(retired_.size(), std::memory_order_relaxed);
  }

 private:
  struct User {
    std::shared_ptr<Progress> progress;
    uint64_t number;
  };
  struct Retired {
    std::byte* memory;
    std::vector<User> users;
  };

  void retire(std::byte* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Retired retired{memory, {}};
    for (const auto& stream : streams_) {
      const std::shared_ptr<Progress> progress = stream.lock();
      if (!progress)
        continue;
      const uint64_t number = progress->num_added();
      if (!progress->has_ended(number))
        retired.users.push_back({progress, number});
    }
    if (retired.users.empty()) {
      free_memory(memory);
      return;
    }
    retired_.push_back(std::move(retired));
    num_retired_.store(retired_.size(), std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<Progress>> streams_;
  std::vector<Retired> retired_;
  std::atomic<size_t> num_retired_{0};
};

SimtDevice::SimtDevice(int rank_idx, int num_sms)
    : rank_idx_(rank_idx),
      num_sms_(num_sms),
      name_("emulator"),
      memory_(std::make_shared<DeviceMemory>()),
      host_stream_(std::make_shared<HostStream>(rank_idx)) {
  MOE_CHECK(num_sms >= 1, "a device of ", num_sms, " SMs");
}

SimtDevice::~SimtDevice() = default;

int32_t SimtDevice::dlpack_type() const {
  return kDlpackCpu;
}

std::shared_ptr<std::byte> SimtDevice::allocate(int64_t bytes) {
  num_zeroed_allocations_.fetch_add(1, std::memory_order_relaxed);
  return DeviceMemory::allocate(memory_, bytes, 0);
}

std::shared_ptr<std::byte> SimtDevice::allocate_unset(int64_t bytes) {
  num_unset_allocations_.fetch_add(1, std::memory_order_relaxed);
  return DeviceMemory::allocate(memory_, bytes, kUnset);
}

std::shared_ptr<std::byte> SimtDevice::allocate_host(int64_t bytes) {
  num_host_allocations_.fetch_add(1, std::memory_order_relaxed);
  return DeviceMemory::allocate(memory_, bytes, 0);
}

const std::byte* SimtDevice::map_host(const void* memory,
                                      int64_t /*bytes*/,
                                      const std::shared_ptr<const void>& /*owner*/) {
  return static_cast<const std::byte*>(memory);  // the process's own address
}

std::shared_ptr<runtime::Stream> SimtDevice::create_stream() {
  auto stream = std::make_shared<WorkerStream>(rank_idx_, [memory = memory_] { memory->sweep(); });
  memory_->watch(stream->progress());
  return stream;
}

std::shared_ptr<runtime::Stream> SimtDevice::caller_stream(uintptr_t handle) {
  MOE_CHECK(handle == 0, "the emulator's caller has stream 0 only, the host's; got ", handle);
  return host_stream_;
}

}  // namespace moe::simt
