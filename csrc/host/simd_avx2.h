#pragma once

#include <immintrin.h>

#include "host/simd_registers.h"

namespace moe::host {
namespace {

/// What row_kernels_impl.h and roof_impl.h are written in, for AVX2 with F16C.
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

  static MOE_FORCE_INLINE void fence() { _mm_sfence(); }
};

}  // namespace
}  // namespace moe::host
