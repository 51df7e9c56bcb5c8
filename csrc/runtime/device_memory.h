#pragma once

#include <cstddef>
#include <cstdint>

#include "core/math.h"

namespace moe::runtime {

/// Cuts one allocation into arrays: first measured with a null base, then placed.
///
/// Example: Suballocator sizes(nullptr); lay(sizes); allocate(sizes.bytes()); Suballocator
/// places(memory);
class Suballocator {
 public:
  explicit Suballocator(std::byte* base) : base_(base) {}

  /// The next array, aligned to 64 bytes; null while measuring.
  template <typename T>
  T* take(int64_t count) {
    std::byte* const place = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ = round_up(bytes_ + count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(place);
  }

  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  int64_t bytes_ = 0;
};

}  // namespace moe::runtime
