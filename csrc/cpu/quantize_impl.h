#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/row_kernels.h"
#include "cpu/row_numbers_impl.h"

// Rows to e4m3, written once. Included by row_kernels_impl.h behind a simd_*.h, which names `Simd`;
// nothing here may exist outside its translation unit.

namespace moe::cpu {
namespace {

using layout::ScaleFormat;

/// Elements that are quantized between two stores: whole blocks of any size, two lines of codes.
constexpr int kSpan = 128;
constexpr int kSpanRegisters = kSpan / Simd::kRegisterBytes;
constexpr float kLargestCode = 448.0f;
constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kNanScaleBits = 0x7FC00000u;
constexpr uint8_t kNanExponent = 0xFF;
constexpr uint8_t kNanCode = 0x7F;

/// Factor of a block's elements where the block has a NaN or an infinity; no other
/// block is multiplied by zero.
constexpr float kNotFinite = 0.0f;

/// The magnitudes of one register of elements, which compare as integers do.
template <int kElementBytes>
struct Magnitudes;

template <>
struct Magnitudes<2> {
  using Lane = int16_t;
  using Lanes = Simd::Shorts;
  static constexpr uint32_t kMask = 0x7FFF7FFFu;
};

template <>
struct Magnitudes<4> {
  using Lane = int32_t;
  using Lanes = Simd::Ints;
  static constexpr uint32_t kMask = 0x7FFFFFFFu;
};

template <typename Lanes>
MOE_FORCE_INLINE Lanes greater(Lanes a, Lanes b) {
  return a > b ? a : b;
}

template <typename Lane, typename Lanes>
MOE_FORCE_INLINE int32_t greatest_lane(Lanes lanes) {
  if constexpr (sizeof lanes > 16) {
    typedef Lane Half __attribute__((vector_size(sizeof lanes / 2)));
    Half halves[2];
    std::memcpy(halves, &lanes, sizeof lanes);
    return greatest_lane<Lane>(greater(halves[0], halves[1]));
  } else if constexpr (sizeof(Lane) == 2) {
    lanes = greater(lanes, __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7, 0, 1, 2, 3));
    lanes = greater(lanes, __builtin_shufflevector(lanes, lanes, 2, 3, 0, 1, 6, 7, 4, 5));
    lanes = greater(lanes, __builtin_shufflevector(lanes, lanes, 1, 0, 3, 2, 5, 4, 7, 6));
    return lanes[0];
  } else {
    lanes = greater(lanes, __builtin_shufflevector(lanes, lanes, 2, 3, 0, 1));
    lanes = greater(lanes, __builtin_shufflevector(lanes, lanes, 1, 0, 3, 2));
    return lanes[0];
  }
}

/// The greatest magnitude of a block; infinity or NaN where it has one.
template <typename Number, int kBlock>
MOE_FORCE_INLINE float greatest_magnitude(const std::byte* src) {
  using Format = Magnitudes<Number::kElementBytes>;
  constexpr int kNumRegisters = kBlock * Number::kElementBytes / Simd::kRegisterBytes;
  typename Format::Lanes most = {};
  for (int i = 0; i < kNumRegisters; ++i) {
    const Simd::Words magnitudes = load(src + i * Simd::kRegisterBytes) & Format::kMask;
    most = greater(most, reinterpret_cast<typename Format::Lanes>(magnitudes));
  }
  Simd::Words code = {};
  code[0] = static_cast<uint32_t>(greatest_lane<typename Format::Lane>(most));
  Simd::Floats values[Number::kWidth];
  Number::widen(code, values);
  return values[0][0];
}

/// The biased exponent of the least power of two that is not below @p value: 0 stands for 2^-127.
/// @param value  +0.0 or more, at most FLT_MAX / 448: the result fits its byte and is below 254.
MOE_FORCE_INLINE uint32_t exponent_above(float value) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t exponent = bits >> 23;
  // Subnormals are above 2^-127 where their mantissa is above its middle.
  const uint32_t power_mantissa = exponent == 0 ? 1u << 22 : 0u;
  return exponent + ((bits & 0x7FFFFFu) > power_mantissa ? 1u : 0u);
}

/// Writes the scale factors of a row, block by block.
class ScaleWriter {
 public:
  MOE_FORCE_INLINE ScaleWriter(const RowQuantization& quantization, void* scales)
      : format_(quantization.scale_format),
        least_amax_(quantization.least_amax),
        scales_(static_cast<std::byte*>(scales)) {}

  /// Writes the next block's scale factor.
  /// @returns what the elements of the block are multiplied by, or kNotFinite.
  template <bool kClamps>
  MOE_FORCE_INLINE float write(float amax) {
    if (!(__builtin_bit_cast(uint32_t, amax) < kInfinityBits)) [[unlikely]] {
      put_scale(kNanScaleBits, kNanExponent);
      return kNotFinite;
    }
    if (kClamps && amax < least_amax_)
      amax = least_amax_;
    const float scale = amax / kLargestCode;
    if (format_ == ScaleFormat::kFloat32) {
      put_scale(__builtin_bit_cast(uint32_t, scale), 0);
      return kLargestCode / amax;
    }
    const uint32_t exponent = exponent_above(scale);
    put_scale(exponent == 0 ? 1u << 22 : exponent << 23, static_cast<uint8_t>(exponent));
    return __builtin_bit_cast(float, (254u - exponent) << 23);
  }

 private:
  MOE_FORCE_INLINE void put_scale(uint32_t bits, uint8_t exponent) {
    if (format_ == ScaleFormat::kUe8m0) {
      std::memcpy(scales_, &exponent, sizeof exponent);
      scales_ += sizeof exponent;
    } else {
      std::memcpy(scales_, &bits, sizeof bits);
      scales_ += sizeof bits;
    }
  }

  ScaleFormat format_;
  float least_amax_;
  std::byte* scales_;
};

/// The e4m3 codes, without sign, of magnitudes that round to 448 or less. Each is in the low byte
/// of its 32-bit lane; the next byte is zero, the rest is of no use. A scaled magnitude exceeds 448
/// by no more than a rounding, which comes back to 448: nothing is left to saturate.
///
/// For a magnitude of exponent e >= -6 the steps of e4m3 are 2^(e-3), below that 2^-9. A number in
/// [2^(e+20), 2^(e+21)) has steps of 2^(e-3) too: adding one rounds as wanted, to nearest even and
/// with subnormals, and leaves the count of steps, 8 to 16 (or 0 to 8), in the low bits of the sum.
/// The code is that count plus 8 * (e + 6). The number added begins with -8 * 121 steps, an even
/// count, because the exponent as it lies in its bits is biased: 8 * (e + 127).
MOE_FORCE_INLINE Simd::Words encode(Simd::Floats magnitudes) {
  constexpr int32_t kLeastExponent = 121 << 23;
  constexpr int32_t kRounder = (20 << 23) + (1 << 22) - 8 * 121;
  const Simd::Ints own = reinterpret_cast<Simd::Ints>(magnitudes) & 0x7F800000;
  const Simd::Ints exponents = greater(own, Simd::Ints{} + kLeastExponent);
  const Simd::Floats rounded = magnitudes + reinterpret_cast<Simd::Floats>(exponents + kRounder);
  const Simd::Ints codes = reinterpret_cast<Simd::Ints>(rounded) + (exponents >> 20);
  return reinterpret_cast<Simd::Words>(codes);
}

/// The codes of kRegisterBytes / 2 elements, one in each 16-bit lane, in order. They are of one
/// block.
template <typename Number>
MOE_FORCE_INLINE Simd::Words encode_elements(const std::byte* src, float multiplier) {
  const auto factor = broadcast<Simd::Floats>(multiplier);
  Simd::Words codes[2];
  if constexpr (Number::kElementBytes == 4) {
    for (int i = 0; i < 2; ++i) {
      const Simd::Words bits = load(src + i * Simd::kRegisterBytes);
      const auto values = reinterpret_cast<Simd::Floats>(bits & Magnitudes<4>::kMask);
      codes[i] = (encode(values * factor) & 0xFFu) | ((bits >> 24) & 0x80u);
    }
    return Simd::narrow_to_16(codes[0], codes[1]);
  } else {
    const Simd::Words bits = load(src);
    Simd::Floats values[2];
    Number::widen(bits & Magnitudes<2>::kMask, values);
    for (int i = 0; i < 2; ++i)
      codes[i] = encode(values[i] * factor);
    const Simd::Words signs = (bits >> 8) & 0x00800080u;
    if constexpr (Number::kIsInterleaved)
      return (signs | (codes[0] & 0xFFu)) | (codes[1] << 16);
    else
      return signs | Simd::narrow_to_16(codes[0] & 0xFFu, codes[1] & 0xFFu);
  }
}

/// Puts kNanCode in the places of register @p idx that belong to blocks that are not finite.
template <int kBlock>
MOE_FORCE_INLINE Simd::Words with_nans(Simd::Words codes, int idx, const float* multipliers) {
  uint8_t mask[Simd::kRegisterBytes];
  for (int i = 0; i < Simd::kRegisterBytes; ++i)
    mask[i] = multipliers[(idx * Simd::kRegisterBytes + i) / kBlock] == kNotFinite ? 0xFF : 0;
  Simd::Words is_nan;
  std::memcpy(&is_nan, mask, sizeof is_nan);
  return (codes & ~is_nan) | (is_nan & (kNanCode * 0x01010101u));
}

/// Factors of the blocks of a span.
template <int kBlock>
struct Multipliers {
  float of_block[kSpan / kBlock] = {};
  bool are_finite = true;
};

/// Finds the multipliers of kSpan elements and writes their scale factors.
/// @param num_elements  fewer for the end of a row; those past it are +0.0 and have no scales.
template <typename Number, int kBlock, bool kClamps>
MOE_FORCE_INLINE Multipliers<kBlock> scale_span(const std::byte* src,
                                                int num_elements,
                                                ScaleWriter& scales) {
  Multipliers<kBlock> multipliers;
  for (int b = 0; b < kSpan / kBlock; ++b) {
    if (b * kBlock >= num_elements)
      break;
    const float amax = greatest_magnitude<Number, kBlock>(src + b * kBlock * Number::kElementBytes);
    multipliers.of_block[b] = scales.write<kClamps>(amax);
    multipliers.are_finite = multipliers.are_finite && multipliers.of_block[b] != kNotFinite;
  }
  return multipliers;
}

/// Quantizes kSpan elements to @p codes, in order.
template <typename Number, int kBlock>
MOE_FORCE_INLINE void encode_span(const std::byte* src,
                                  const Multipliers<kBlock>& multipliers,
                                  Simd::Words* codes) {
  constexpr int kUnit = Simd::kRegisterBytes / 2;
  const float* const of_block = multipliers.of_block;
  for (int i = 0; i < kSpanRegisters; ++i) {
    const int even = 2 * i * kUnit;
    const int odd = even + kUnit;
    codes[i] = Simd::narrow_to_8(
        encode_elements<Number>(src + even * Number::kElementBytes, of_block[even / kBlock]),
        encode_elements<Number>(src + odd * Number::kElementBytes, of_block[odd / kBlock]));
  }
  if (!multipliers.are_finite) [[unlikely]]
    for (int i = 0; i < kSpanRegisters; ++i)
      codes[i] = with_nans<kBlock>(codes[i], i, of_block);
}

template <typename Number, int kBlock, bool kClamps, bool kStream>
void quantize_row_of(const RowQuantization& quantization,
                     const std::byte* src,
                     std::byte* const* dst,
                     int num_dst,
                     void* scale_factors) {
  ScaleWriter scales(quantization, scale_factors);
  const int64_t hidden = quantization.hidden;
  Simd::Words codes[kSpanRegisters];
  int64_t at = 0;
  Multipliers<kBlock> next;
  if (hidden >= kSpan)
    next = scale_span<Number, kBlock, kClamps>(src, kSpan, scales);
  for (; at + kSpan <= hidden; at += kSpan) {
    // One span ahead: its long chain of dependent instructions runs while stores wait for memory.
    const Multipliers<kBlock> multipliers = next;
    const std::byte* const span = src + at * Number::kElementBytes;
    if (at + 2 * kSpan <= hidden)
      next =
          scale_span<Number, kBlock, kClamps>(span + kSpan * Number::kElementBytes, kSpan, scales);
    encode_span<Number, kBlock>(span, multipliers, codes);
    for (int d = 0; d < num_dst; ++d)
      for (int i = 0; i < kSpanRegisters; ++i)
        put<kStream>(dst[d] + at + i * Simd::kRegisterBytes, codes[i]);
  }
  const int64_t left = hidden - at;
  if (left == 0)
    return;
  std::byte padded[kSpan * Number::kElementBytes] = {};
  std::memcpy(padded, src + at * Number::kElementBytes, left * Number::kElementBytes);
  const auto last = scale_span<Number, kBlock, kClamps>(padded, static_cast<int>(left), scales);
  encode_span<Number, kBlock>(padded, last, codes);
  // Only whole lines go past the caches.
  const int num_whole = static_cast<int>(left / kLineBytes) * kRegistersPerLine;
  const int64_t whole = num_whole * Simd::kRegisterBytes;
  for (int d = 0; d < num_dst; ++d) {
    for (int i = 0; i < num_whole; ++i)
      put<kStream>(dst[d] + at + i * Simd::kRegisterBytes, codes[i]);
    std::memcpy(
        dst[d] + at + whole, reinterpret_cast<const std::byte*>(codes) + whole, left - whole);
  }
}

template <typename Number, int kBlock>
void quantize_row_by(const RowQuantization& quantization,
                     const std::byte* src,
                     std::byte* const* dst,
                     int num_dst,
                     void* scales,
                     bool is_streaming) {
  const bool clamps = quantization.least_amax > 0;
  if (clamps && is_streaming)
    quantize_row_of<Number, kBlock, true, true>(quantization, src, dst, num_dst, scales);
  else if (clamps)
    quantize_row_of<Number, kBlock, true, false>(quantization, src, dst, num_dst, scales);
  else if (is_streaming)
    quantize_row_of<Number, kBlock, false, true>(quantization, src, dst, num_dst, scales);
  else
    quantize_row_of<Number, kBlock, false, false>(quantization, src, dst, num_dst, scales);
}

template <typename Number>
void quantize_row_from(const RowQuantization& quantization,
                       const std::byte* src,
                       std::byte* const* dst,
                       int num_dst,
                       void* scales,
                       bool is_streaming) {
  switch (quantization.block) {
    case 128:
      return quantize_row_by<Number, 128>(quantization, src, dst, num_dst, scales, is_streaming);
    case 64:
      return quantize_row_by<Number, 64>(quantization, src, dst, num_dst, scales, is_streaming);
    case 32:
      return quantize_row_by<Number, 32>(quantization, src, dst, num_dst, scales, is_streaming);
  }
  assert(false && "quantize_row: callers ask can_quantize()");
}

void quantize_row(const RowQuantization& quantization,
                  const std::byte* src,
                  std::byte* const* dst,
                  int num_dst,
                  void* scales,
                  StoreMode mode) {
  bool is_streaming = mode == StoreMode::kStreaming;
  for (int d = 0; d < num_dst; ++d)
    is_streaming = is_streaming && reinterpret_cast<uintptr_t>(dst[d]) % kLineBytes == 0;
  switch (quantization.dtype) {
    case DType::kBFloat16:
      return quantize_row_from<BFloat16>(quantization, src, dst, num_dst, scales, is_streaming);
    case DType::kFloat16:
      return quantize_row_from<Float16>(quantization, src, dst, num_dst, scales, is_streaming);
    case DType::kFloat32:
      return quantize_row_from<Float32>(quantization, src, dst, num_dst, scales, is_streaming);
    case DType::kFloat64:
    case DType::kBytes:
      break;
  }
  assert(false && "quantize_row: rows are bf16, fp16 or fp32");
}

}  // namespace
}  // namespace moe::cpu
