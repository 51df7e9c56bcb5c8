#include "group/rail_buffers.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "core/sync.h"

namespace moe::group {

namespace {

constexpr uint64_t kLeastBytes = 4096;
constexpr size_t kPageBytes = 4096;

}  // namespace

/// Free buffers by size, which is a power of two.
class RailBuffers::Store {
 public:
  explicit Store(uint64_t most_kept_bytes) : most_kept_bytes_(most_kept_bytes) {}
  ~Store() {
    for (const auto& memories : free_)
      for (std::byte* memory : memories)
        std::free(memory);
  }

  std::byte* take(uint64_t size) {
    {
      const std::lock_guard<sync::Mutex> lock(mutex_);
      auto& memories = of(size);
      if (!memories.empty()) {
        std::byte* const memory = memories.back();
        memories.pop_back();
        kept_bytes_ -= size;
        return memory;
      }
    }
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPageBytes, size));
    if (memory == nullptr)
      throw std::bad_alloc();
    return memory;
  }

  void give_back(std::byte* memory, uint64_t size) {
    {
      const std::lock_guard<sync::Mutex> lock(mutex_);
      if (kept_bytes_ + size <= most_kept_bytes_) {
        of(size).push_back(memory);
        kept_bytes_ += size;
        return;
      }
    }
    std::free(memory);
  }

  uint64_t kept_bytes() {
    const std::lock_guard<sync::Mutex> lock(mutex_);
    return kept_bytes_;
  }

 private:
  std::vector<std::byte*>& of(uint64_t size) {
    return free_[static_cast<size_t>(std::countr_zero(size))];
  }

  const uint64_t most_kept_bytes_;
  sync::Mutex mutex_;
  std::array<std::vector<std::byte*>, 64> free_;
  uint64_t kept_bytes_ = 0;
};

RailBuffers::RailBuffers(uint64_t most_kept_bytes)
    : store_(std::make_shared<Store>(most_kept_bytes)) {}

Rail::Buffer RailBuffers::take(uint64_t bytes) {
  const uint64_t size = std::bit_ceil(std::max(bytes, kLeastBytes));
  return {store_->take(size),
          [store = store_, size](std::byte* memory) { store->give_back(memory, size); }};
}

uint64_t RailBuffers::kept_bytes() const {
  return store_->kept_bytes();
}

}  // namespace moe::group
