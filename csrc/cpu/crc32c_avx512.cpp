#if defined(__x86_64__)

#include <immintrin.h>

#include "cpu/crc32c_fold.h"

namespace moe::cpu {

__attribute__((target("pclmul,vpclmulqdq"))) void fold_crc32c_avx512(const Crc32cFold& fold,
                                                                     uint32_t crc,
                                                                     const std::byte* data,
                                                                     size_t num_blocks,
                                                                     std::byte* folded) {
  const __m512i factors = _mm512_broadcast_i32x4(
      _mm_set_epi64x(static_cast<int64_t>(fold.high), static_cast<int64_t>(fold.low)));
  __m512i sums[4];
  for (int i = 0; i < 4; ++i)
    sums[i] = _mm512_loadu_si512(data + 64 * i);
  sums[0] =
      _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (size_t block_idx = 1; block_idx < num_blocks; ++block_idx) {
    data += Crc32cFold::kBlockBytes;
    for (int i = 0; i < 4; ++i) {
      constexpr int kXor3 = 0x96;
      sums[i] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sums[i], factors, 0x00),
                                          _mm512_clmulepi64_epi128(sums[i], factors, 0x11),
                                          _mm512_loadu_si512(data + 64 * i),
                                          kXor3);
    }
  }
  for (int i = 0; i < 4; ++i)
    _mm512_storeu_si512(folded + 64 * i, sums[i]);
}

}  // namespace moe::cpu

#endif
