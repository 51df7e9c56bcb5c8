#pragma once

#include <immintrin.h>

#include "cpu/simd_registers.h"

namespace moe::cpu {
namespace {

/// Vocabulary of row_kernels_impl.h and roof_impl.h for AVX-512 (F, BW, VL and DQ).
struct Simd : Registers<64> {
  /// @param dst  Aligned to 64 bytes.
  static MOE_FORCE_INLINE void stream(std::byte* dst, Words value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), reinterpret_cast<__m512i>(value));
  }

  static MOE_FORCE_INLINE void widen_float16(Words bits, Floats* values) {
    const auto codes = reinterpret_cast<__m512i>(bits);
    values[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(codes));
    values[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(codes, 1));
  }

  static MOE_FORCE_INLINE Words narrow_float16(const Floats* values) {
    const __m256i low = _mm512_cvtps_ph(values[0], _MM_FROUND_TO_NEAREST_INT);
    const __m256i high = _mm512_cvtps_ph(values[1], _MM_FROUND_TO_NEAREST_INT);
    return reinterpret_cast<Words>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }

  /// The 32-bit lanes of two registers, each at most 0xFFFF, as 16-bit lanes.
  static MOE_FORCE_INLINE Words narrow_to_16(Words low, Words high) {
    return in_order(
        _mm512_packus_epi32(reinterpret_cast<__m512i>(low), reinterpret_cast<__m512i>(high)));
  }

  /// The 16-bit lanes of two registers, each at most 0xFF, as bytes.
  static MOE_FORCE_INLINE Words narrow_to_8(Words low, Words high) {
    return in_order(
        _mm512_packus_epi16(reinterpret_cast<__m512i>(low), reinterpret_cast<__m512i>(high)));
  }

  static MOE_FORCE_INLINE void fence() { _mm_sfence(); }

 private:
  /// Packing works in each 16 bytes apart: 8 bytes of the one register, 8 of the other.
  static MOE_FORCE_INLINE Words in_order(__m512i lanes) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return reinterpret_cast<Words>(_mm512_permutexvar_epi64(order, lanes));
  }
};

}  // namespace
}  // namespace moe::cpu
