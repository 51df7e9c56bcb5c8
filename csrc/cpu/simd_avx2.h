#pragma once

#include <immintrin.h>

#include "cpu/simd_registers.h"

namespace moe::cpu {
namespace {

/// Vocabulary of row_kernels_impl.h and roof_impl.h for AVX2 with F16C.
struct Simd : Registers<32> {
  /// @param dst  Aligned to 32 bytes.
  static MOE_FORCE_INLINE void stream(std::byte* dst, Words value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), reinterpret_cast<__m256i>(value));
  }

  static MOE_FORCE_INLINE void widen_float16(Words bits, Floats* values) {
    const auto codes = reinterpret_cast<__m256i>(bits);
    values[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(codes));
    values[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(codes, 1));
  }

  static MOE_FORCE_INLINE Words narrow_float16(const Floats* values) {
    const __m128i low = _mm256_cvtps_ph(values[0], _MM_FROUND_TO_NEAREST_INT);
    const __m128i high = _mm256_cvtps_ph(values[1], _MM_FROUND_TO_NEAREST_INT);
    return reinterpret_cast<Words>(_mm256_set_m128i(high, low));
  }

  /// The 32-bit lanes of two registers, each at most 0xFFFF, as 16-bit lanes.
  static MOE_FORCE_INLINE Words narrow_to_16(Words low, Words high) {
    return in_order(
        _mm256_packus_epi32(reinterpret_cast<__m256i>(low), reinterpret_cast<__m256i>(high)));
  }

  /// The 16-bit lanes of two registers, each at most 0xFF, as bytes.
  static MOE_FORCE_INLINE Words narrow_to_8(Words low, Words high) {
    return in_order(
        _mm256_packus_epi16(reinterpret_cast<__m256i>(low), reinterpret_cast<__m256i>(high)));
  }

  static MOE_FORCE_INLINE void fence() { _mm_sfence(); }

 private:
  /// Packing works in each 16 bytes apart: 8 bytes of the one register, 8 of the other.
  static MOE_FORCE_INLINE Words in_order(__m256i lanes) {
    return reinterpret_cast<Words>(_mm256_permute4x64_epi64(lanes, 0xD8));
  }
};

}  // namespace
}  // namespace moe::cpu
