#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace moe {

/// Element types that can be added; every other type moves as bytes.
enum class DType : int32_t { kBytes = 0, kBFloat16 = 1, kFloat16 = 2, kFloat32 = 3, kFloat64 = 4 };

MOE_HOST_DEVICE constexpr int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kBytes:
      return 1;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBytes:
      return "bytes";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown";
}

/// DLPack's type code and bits, packed as `code << 8 | bits`: names a dtype between ranks and
/// towards Python.
constexpr int32_t dlpack_type(DType dtype) {
  switch (dtype) {
    case DType::kBytes:
      return 1 << 8 | 8;
    case DType::kBFloat16:
      return 4 << 8 | 16;
    case DType::kFloat16:
      return 2 << 8 | 16;
    case DType::kFloat32:
      return 2 << 8 | 32;
    case DType::kFloat64:
      return 2 << 8 | 64;
  }
  return 0;
}

inline float bfloat16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// Nearest even, subnormals kept, every NaN becomes 0x7FC0.
inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
    return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float float16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0x1Fu)
    return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  if (mantissa == 0)
    return std::bit_cast<float>(sign);
  const int shift = std::countl_zero(mantissa) - 21;  // brings the leading bit to position 10
  mantissa = (mantissa << shift) & 0x3FFu;
  return std::bit_cast<float>(sign | ((113u - static_cast<uint32_t>(shift)) << 23) |
                              (mantissa << 13));
}

/// Nearest even, subnormals kept, every NaN becomes 0x7E00.
inline uint16_t float_to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7F800000u)
    return 0x7E00;
  if (magnitude >= 0x477FF000u)  // rounds to 65536 or more
    return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x33000001u)  // at most half of the smallest subnormal
    return sign;
  const uint32_t exponent = magnitude >> 23;
  if (exponent >= 113u) {
    const uint32_t rebased = magnitude - (112u << 23);
    return static_cast<uint16_t>(sign | ((rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13));
  }
  const uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
  const uint32_t shift = 126u - exponent;  // 14..24
  const uint32_t kept = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  const uint32_t round_up = (rest > half || (rest == half && (kept & 1u))) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (kept + round_up));
}

}  // namespace moe
