#pragma once

#include <cstdint>

#include "device/numbers.h"
#include "device/primitives.h"
#include "layout/scale_format.h"

// Rows to e4m3 by a warp: the arithmetic of docs/quantization.md, bit for bit that of the CPU
// backend. Every lane holds kLaneElements successive elements; the lanes of a block, which are
// neighbors, agree on its greatest magnitude.

namespace moe::device {

using layout::ScaleFormat;

constexpr int kLaneElements = 16;
/// Elements that a warp quantizes at a time: whole blocks of any size.
constexpr int kWarpElements = 32 * kLaneElements;
constexpr float kLargestCode = 448.0f;
constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kNanScaleBits = 0x7FC00000u;
constexpr uint32_t kNanExponent = 0xFFu;
constexpr uint32_t kNanCodes = 0x7F7F7F7Fu;

struct BlockScale {
  float multiplier;   ///< factor of the elements; 0 only if the block has a NaN or an infinity
  uint32_t bits;      ///< bits of the float32 scale factor
  uint32_t exponent;  ///< UE8M0
};

/// The biased exponent of the least power of two that is not below @p value: 0 stands for 2^-127.
/// @param value  +0.0 or more, at most FLT_MAX / 448: the result is below 254.
MOE_DEVICE uint32_t exponent_above(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t exponent = bits >> 23;
  // Subnormals are above 2^-127 where their mantissa is above its middle.
  const uint32_t power_mantissa = exponent == 0 ? 1u << 22 : 0u;
  return exponent + ((bits & 0x7FFFFFu) > power_mantissa ? 1u : 0u);
}

/// @param amax        greatest magnitude of the block; infinity or NaN where it has one
/// @param least_amax  least value that @p amax counts as
MOE_DEVICE BlockScale block_scale(float amax, float least_amax, ScaleFormat format) {
  if (!(float_bits(amax) < kInfinityBits))
    return {0.0f, kNanScaleBits, kNanExponent};
  if (amax < least_amax)
    amax = least_amax;
  const float scale = divide(amax, kLargestCode);
  if (format == ScaleFormat::kFloat32)
    return {divide(kLargestCode, amax), float_bits(scale), 0};
  const uint32_t exponent = exponent_above(scale);
  return {bits_float((254u - exponent) << 23), exponent == 0 ? 1u << 22 : exponent << 23, exponent};
}

/// The e4m3 code, without sign, of a magnitude that rounds to 448 or less, in the low byte. A
/// scaled magnitude exceeds 448 by no more than a rounding, which comes back to 448.
///
/// For a magnitude of exponent e >= -6 the steps of e4m3 are 2^(e-3), below that 2^-9. A number in
/// [2^(e+20), 2^(e+21)) has steps of 2^(e-3) too: adding one rounds to nearest even and leaves the
/// count of steps, 8 to 16 (or 0 to 8), in the low bits of the sum. The code is that count plus
/// 8 * (e + 6); the number added begins with -8 * 121 steps because the exponent that is added to
/// the sum is biased.
MOE_DEVICE uint32_t encode_magnitude(float magnitude) {
  constexpr uint32_t kLeastExponent = 121u << 23;
  constexpr uint32_t kRounder = (20u << 23) + (1u << 22) - 8u * 121u;
  const uint32_t own = float_bits(magnitude) & 0x7F800000u;
  const uint32_t exponent = own > kLeastExponent ? own : kLeastExponent;
  const float rounded = add(magnitude, bits_float(exponent + kRounder));
  return (float_bits(rounded) + (exponent >> 20)) & 0xFFu;
}

/// Quantizes kWarpElements elements; all lanes of the warp call.
/// @param values  this lane's elements, +0.0 behind the end of the row
/// @param scale   scale of their block, written; the same on all lanes of the block
/// @return this lane's codes, in order.
MOE_DEVICE Bytes16 quantize_elements(const float (&values)[kLaneElements],
                                     int block,
                                     float least_amax,
                                     ScaleFormat format,
                                     BlockScale* scale) {
  // Magnitudes compare as their bits do, NaN above infinity.
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const uint32_t magnitude = float_bits(values[i]) & 0x7FFFFFFFu;
    most = magnitude > most ? magnitude : most;
  }
  for (int mask = 1; mask < block / kLaneElements; mask *= 2) {
    const uint32_t other = shuffle_xor(most, mask);
    most = other > most ? other : most;
  }
  *scale = block_scale(bits_float(most), least_amax, format);
  Bytes16 codes;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = float_bits(values[4 * word + i]);
      const float magnitude = multiply(bits_float(bits & 0x7FFFFFFFu), scale->multiplier);
      packed |= (encode_magnitude(magnitude) | (bits >> 24 & 0x80u)) << (8 * i);
    }
    codes.words[word] = scale->multiplier == 0.0f ? kNanCodes : packed;
  }
  return codes;
}

/// Stores the scale factor of block @p block_idx of a row. One lane of the block calls.
/// @param scales  scale factors of the row: 4 bytes a block, with kUe8m0 one
MOE_DEVICE void store_scale(std::byte* scales,
                            int64_t block_idx,
                            const BlockScale& scale,
                            ScaleFormat format) {
  if (format == ScaleFormat::kUe8m0)
    store(reinterpret_cast<uint8_t*>(scales) + block_idx, static_cast<uint8_t>(scale.exponent));
  else
    store(reinterpret_cast<uint32_t*>(scales) + block_idx, scale.bits);
}

}  // namespace moe::device
