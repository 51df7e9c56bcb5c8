#pragma once

#include <immintrin.h>

#include "host/simd_registers.h"

namespace moe::host {
namespace {

/// What row_kernels_impl.h and roof_impl.h are written in, for AVX-512 (F, BW, VL and DQ).
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

  static MOE_FORCE_INLINE void fence() { _mm_sfence(); }
};

}  // namespace
}  // namespace moe::host
