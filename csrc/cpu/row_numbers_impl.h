#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/simd_registers.h"

// Conversion of one register of row elements to registers of numbers that are added, and back.
// Included by row_kernels_impl.h behind a simd_*.h, which names `Simd`.

namespace moe::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int kRegistersPerLine = static_cast<int>(kLineBytes) / Simd::kRegisterBytes;

MOE_FORCE_INLINE Simd::Words load(const std::byte* src) {
  Simd::Words value;
  std::memcpy(&value, src, sizeof value);
  return value;
}

MOE_FORCE_INLINE void store(std::byte* dst, Simd::Words value) {
  std::memcpy(dst, &value, sizeof value);
}

template <bool kStream>
MOE_FORCE_INLINE void put(std::byte* dst, Simd::Words value) {
  if constexpr (kStream)
    Simd::stream(dst, value);
  else
    store(dst, value);
}

/// Subtracting +0.0 keeps every value, -0.0 included; adding it would not.
template <typename Register, typename Scalar>
MOE_FORCE_INLINE Register broadcast(Scalar value) {
  return value - Register{};
}

/// NaNs become the positive quiet NaN without payload, from which every narrower type gets its own.
template <typename Register>
MOE_FORCE_INLINE Register canonical(Register value) {
  using Scalar = decltype(value[0] + value[0]);
  return value == value ? value : broadcast<Register>(static_cast<Scalar>(__builtin_nan("")));
}

/// Elements at even places are `values[0]`, at odd places `values[1]`: no element changes its lane.
struct BFloat16 {
  using Scalar = float;
  using Register = Simd::Floats;
  static constexpr int kElementBytes = 2;
  static constexpr int kWidth = 2;
  static constexpr bool kIsInterleaved = true;

  static MOE_FORCE_INLINE void widen(Simd::Words bits, Register* values) {
    values[0] = reinterpret_cast<Register>(bits << 16);
    values[1] = reinterpret_cast<Register>(bits & 0xFFFF0000u);
  }
  static MOE_FORCE_INLINE Simd::Words rounded(Register value) {
    const auto bits = reinterpret_cast<Simd::Words>(canonical(value));
    return bits + 0x7FFFu + ((bits >> 16) & 1u);
  }
  static MOE_FORCE_INLINE Simd::Words narrow(const Register* values) {
    return (rounded(values[0]) >> 16) | (rounded(values[1]) & 0xFFFF0000u);
  }
};

struct Float16 {
  using Scalar = float;
  using Register = Simd::Floats;
  static constexpr int kElementBytes = 2;
  static constexpr int kWidth = 2;
  static constexpr bool kIsInterleaved = false;

  static MOE_FORCE_INLINE void widen(Simd::Words bits, Register* values) {
    Simd::widen_float16(bits, values);
  }
  static MOE_FORCE_INLINE Simd::Words narrow(const Register* values) {
    const Register clean[2] = {canonical(values[0]), canonical(values[1])};
    return Simd::narrow_float16(clean);
  }
};

/// Added in the type that it has.
template <typename ScalarType, typename RegisterType>
struct Unwidened {
  using Scalar = ScalarType;
  using Register = RegisterType;
  static constexpr int kElementBytes = sizeof(Scalar);
  static constexpr int kWidth = 1;
  static constexpr bool kIsInterleaved = false;

  static MOE_FORCE_INLINE void widen(Simd::Words bits, Register* values) {
    values[0] = reinterpret_cast<Register>(bits);
  }
  static MOE_FORCE_INLINE Simd::Words narrow(const Register* values) {
    return reinterpret_cast<Simd::Words>(canonical(values[0]));
  }
};

using Float32 = Unwidened<float, Simd::Floats>;
using Float64 = Unwidened<double, Simd::Doubles>;

/// Element i of a dot product is added into lane i mod kDotLanes.
constexpr int kDotLanes = 32;
template <typename Number>
constexpr int kDotRegisters = kDotLanes * Number::kElementBytes / Simd::kRegisterBytes;

/// Adds the lanes pairwise 16, 8, 4, 2, 1.
/// @param acc  kDotRegisters<Number> * kWidth registers, as `widen` orders the elements.
template <typename Number>
double add_lanes(const typename Number::Register* acc) {
  using Scalar = typename Number::Scalar;
  constexpr int kPerRegister = Simd::kRegisterBytes / static_cast<int>(sizeof(Scalar));
  Scalar lanes[kDotLanes];
  for (int i = 0; i < kDotLanes; ++i) {
    int place = i;
    if (Number::kIsInterleaved) {
      const int pair = i / (2 * kPerRegister);
      const int within = i % (2 * kPerRegister);
      place = (2 * pair + within % 2) * kPerRegister + within / 2;
    }
    lanes[i] = acc[place / kPerRegister][place % kPerRegister];
  }
  for (int half = kDotLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      lanes[i] += lanes[i + half];
  return lanes[0] == lanes[0] ? static_cast<double>(lanes[0]) : __builtin_nan("");
}

}  // namespace
}  // namespace moe::cpu
