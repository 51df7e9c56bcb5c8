#pragma once

// What checks of kernels that add, scale and copy rows share.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device/launch.h"
#include "simt/grid.h"

namespace moe::kernel_rows {

inline std::mt19937_64 g_random(12345);

inline int64_t draw(int64_t below) {
  return static_cast<int64_t>(g_random() % static_cast<uint64_t>(below));
}

template <typename T>
T draw_one_of(std::initializer_list<T> values) {
  return values.begin()[draw(static_cast<int64_t>(values.size()))];
}

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

/// Memory that no kernel may leave as it is where a result belongs, nor touch around it.
class Guarded {
 public:
  /// @param misalignment  Bytes from a multiple of 256 to data().
  explicit Guarded(int64_t bytes, int64_t misalignment = 0)
      : bytes_(bytes), storage_(static_cast<size_t>(bytes + 3 * kStep), kPoison) {
    auto* const begin = storage_.data();
    data_ = begin + kStep + (kStep - reinterpret_cast<uintptr_t>(begin) % kStep) + misalignment;
  }

  Guarded(Guarded&&) = default;
  Guarded(const Guarded&) = delete;

  std::byte* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

  bool is_intact_around() const {
    const auto is_poison = [](std::byte byte) { return byte == kPoison; };
    return std::all_of(storage_.data(), static_cast<const std::byte*>(data_), is_poison) &&
           std::all_of(static_cast<const std::byte*>(data_) + bytes_,
                       storage_.data() + storage_.size(),
                       is_poison);
  }
  bool equals(const Guarded& other) const {
    return std::memcmp(data_, other.data_, static_cast<size_t>(bytes_)) == 0;
  }

 private:
  static constexpr int64_t kStep = 256;
  static constexpr std::byte kPoison{0xEE};

  int64_t bytes_;
  std::vector<std::byte> storage_;
  std::byte* data_;
};

/// Runs a kernel at once.
class Stream : public simt::Stream {
 public:
  void launch(simt::Kernel kernel) override {
    simt::launch_grid(scheduler_, std::move(kernel));
    scheduler_.run();
  }

 private:
  simt::Scheduler scheduler_;
};

inline Stream& stream() {
  static Stream stream;
  return stream;
}

inline device::Launch draw_launch() {
  device::Launch launch;
  launch.num_blocks = draw_one_of({1, 2, 5});
  launch.num_threads = draw_one_of({32, 64, 128});
  launch.stream = &stream();
  return launch;
}

inline std::string describe(const device::Launch& launch) {
  return std::to_string(launch.num_blocks) + " blocks of " + std::to_string(launch.num_threads);
}

/// Batches of copies between random tensors, held to cpu::copy_strided().
void check_strided_copies();

}  // namespace moe::kernel_rows
