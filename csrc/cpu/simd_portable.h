#pragma once

#include <atomic>
#include <cstring>

#include "core/dtype.h"
#include "cpu/simd_registers.h"

namespace moe::cpu {
namespace {

/// Vocabulary of row_kernels_impl.h and roof_impl.h for any machine. It knows no
/// non-temporal store, so streaming is an ordinary store.
struct Simd : Registers<16> {
  static MOE_FORCE_INLINE void stream(std::byte* dst, Words value) {
    std::memcpy(dst, &value, sizeof value);
  }

  static MOE_FORCE_INLINE void widen_float16(Words bits, Floats* values) {
    uint16_t codes[8];
    float numbers[8];
    std::memcpy(codes, &bits, sizeof codes);
    for (int i = 0; i < 8; ++i)
      numbers[i] = float16_to_float(codes[i]);
    std::memcpy(values, numbers, sizeof numbers);
  }

  static MOE_FORCE_INLINE Words narrow_float16(const Floats* values) {
    uint16_t codes[8];
    float numbers[8];
    std::memcpy(numbers, values, sizeof numbers);
    for (int i = 0; i < 8; ++i)
      codes[i] = float_to_float16(numbers[i]);
    Words bits;
    std::memcpy(&bits, codes, sizeof bits);
    return bits;
  }

  /// The 32-bit lanes of two registers, each at most 0xFFFF, as 16-bit lanes.
  static MOE_FORCE_INLINE Words narrow_to_16(Words low, Words high) {
    return narrow<uint32_t, uint16_t>(low, high);
  }

  /// The 16-bit lanes of two registers, each at most 0xFF, as bytes.
  static MOE_FORCE_INLINE Words narrow_to_8(Words low, Words high) {
    return narrow<uint16_t, uint8_t>(low, high);
  }

  static MOE_FORCE_INLINE void fence() { std::atomic_thread_fence(std::memory_order_release); }

 private:
  template <typename From, typename To>
  static MOE_FORCE_INLINE Words narrow(Words low, Words high) {
    constexpr int kNumLanes = kRegisterBytes / sizeof(To);
    From wide[kNumLanes];
    std::memcpy(wide, &low, sizeof low);
    std::memcpy(wide + kNumLanes / 2, &high, sizeof high);
    To lanes[kNumLanes];
    for (int i = 0; i < kNumLanes; ++i)
      lanes[i] = static_cast<To>(wide[i]);
    Words packed;
    std::memcpy(&packed, lanes, sizeof packed);
    return packed;
  }
};

}  // namespace
}  // namespace moe::cpu
