#pragma once

#include <bit>
#include <cstdint>

#include "device/primitives.h"

// Rows as numbers: elements widen to the type they are added in and are rounded once on the way
// back, to nearest even, subnormals kept. A NaN is stored as 0x7FC0 (bf16), 0x7E00 (fp16),
// 0x7FC00000 or 0x7FF8000000000000.

namespace moe::device {

struct BFloat16 {
  using Scalar = float;
  using Bits = uint16_t;
  static MOE_DEVICE float widen(uint16_t bits) { return bfloat16_to_float(bits); }
  static MOE_DEVICE uint16_t narrow(float value) { return float_to_bfloat16(value); }
};

struct Float16 {
  using Scalar = float;
  using Bits = uint16_t;
  static MOE_DEVICE float widen(uint16_t bits) { return half_to_float(bits); }
  static MOE_DEVICE uint16_t narrow(float value) { return float_to_half(value); }
};

struct Float32 {
  using Scalar = float;
  using Bits = uint32_t;
  static MOE_DEVICE float widen(uint32_t bits) { return bits_float(bits); }
  static MOE_DEVICE uint32_t narrow(float value) {
    return value == value ? float_bits(value) : 0x7FC00000u;
  }
};

struct Float64 {
  using Scalar = double;
  using Bits = uint64_t;
  static MOE_DEVICE double widen(uint64_t bits) { return std::bit_cast<double>(bits); }
  static MOE_DEVICE uint64_t narrow(double value) {
    return value == value ? std::bit_cast<uint64_t>(value) : 0x7FF8000000000000ull;
  }
};

/// Elements that one access moves: several in a Bytes16, or one.
template <typename Number, typename Unit>
constexpr int kElementsPerUnit = static_cast<int>(sizeof(Unit) / sizeof(typename Number::Bits));

/// @param values  kElementsPerUnit<Number, Unit>
template <typename Number, typename Unit>
MOE_DEVICE void widen_unit(const Unit& unit, typename Number::Scalar* values) {
  if constexpr (sizeof(Unit) == sizeof(typename Number::Bits)) {
    values[0] = Number::widen(unit);
  } else {
    using Bits = typename Number::Bits;
    for (int word = 0; word < 4; ++word) {
      if constexpr (sizeof(Bits) == 2) {
        values[2 * word] = Number::widen(static_cast<uint16_t>(unit.words[word]));
        values[2 * word + 1] = Number::widen(static_cast<uint16_t>(unit.words[word] >> 16));
      } else if constexpr (sizeof(Bits) == 4) {
        values[word] = Number::widen(unit.words[word]);
      } else if (word % 2 == 0) {
        values[word / 2] =
            Number::widen(unit.words[word] | static_cast<uint64_t>(unit.words[word + 1]) << 32);
      }
    }
  }
}

template <typename Number, typename Unit>
MOE_DEVICE Unit narrow_unit(const typename Number::Scalar* values) {
  if constexpr (sizeof(Unit) == sizeof(typename Number::Bits)) {
    return Number::narrow(values[0]);
  } else {
    using Bits = typename Number::Bits;
    Unit unit;
    for (int word = 0; word < 4; ++word) {
      if constexpr (sizeof(Bits) == 2) {
        unit.words[word] = Number::narrow(values[2 * word]) |
                           static_cast<uint32_t>(Number::narrow(values[2 * word + 1])) << 16;
      } else if constexpr (sizeof(Bits) == 4) {
        unit.words[word] = Number::narrow(values[word]);
      } else if (word % 2 == 0) {
        const uint64_t bits = Number::narrow(values[word / 2]);
        unit.words[word] = static_cast<uint32_t>(bits);
        unit.words[word + 1] = static_cast<uint32_t>(bits >> 32);
      }
    }
    return unit;
  }
}

}  // namespace moe::device
