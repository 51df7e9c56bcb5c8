#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/roof.h"
#include "cpu/row_numbers_impl.h"

// The roofs, written once; see row_kernels_impl.h for how it is compiled. They share no loop with
// the row kernels, so that a slow kernel cannot lower its own roof.

namespace moe::cpu {
namespace {

constexpr int64_t kRoofLineBytes = 64;
constexpr int kRoofRegisters = static_cast<int>(kRoofLineBytes) / Simd::kRegisterBytes;
/// Lines read from one stream before the next, and how far ahead.
constexpr int64_t kRoofBurstLines = 4;
constexpr int64_t kRoofPrefetchBytes = 512;

template <bool kStream>
void roof_fan_out_lines(const std::byte* src,
                        int64_t bytes,
                        std::byte* const* dst,
                        int num_copies) {
  for (int64_t at = 0; at < bytes; at += kRoofLineBytes) {
    Simd::Words line[kRoofRegisters];
    for (int i = 0; i < kRoofRegisters; ++i)
      line[i] = load(src + at + i * Simd::kRegisterBytes);
    for (int c = 0; c < num_copies; ++c)
      for (int i = 0; i < kRoofRegisters; ++i)
        put<kStream>(dst[c] + at + i * Simd::kRegisterBytes, line[i]);
  }
  Simd::fence();
}

void roof_fan_out(const std::byte* src,
                  int64_t num_rows,
                  int64_t row_bytes,
                  std::byte* const* dst,
                  int num_copies,
                  StoreMode mode) {
  const auto run =
      mode == StoreMode::kStreaming ? roof_fan_out_lines<true> : roof_fan_out_lines<false>;
  run(src, num_rows * row_bytes, dst, num_copies);
}

/// Sums @p kLines lines of every stream.
/// @tparam kNumSrc  num_src, or 0 for any number.
template <bool kStream, int64_t kLines, int kNumSrc>
MOE_FORCE_INLINE void roof_sum_burst(const std::byte* const* src,
                                     int num_src,
                                     int64_t at,
                                     std::byte* dst) {
  constexpr int kRegisters = static_cast<int>(kLines) * kRoofRegisters;
  const int count = kNumSrc == 0 ? num_src : kNumSrc;
  Simd::Words sums[kRegisters] = {};
  // Unrolled, so that each stream has load instructions of its own: some prefetchers tell streams
  // apart by the instruction, and a rolled loop was measured to read at two thirds of this.
#pragma GCC unroll 8
  for (int k = 0; k < count; ++k) {
    for (int64_t line = 0; line < kLines; ++line)
      __builtin_prefetch(src[k] + at + kRoofPrefetchBytes + line * kRoofLineBytes);
    for (int i = 0; i < kRegisters; ++i)
      sums[i] += load(src[k] + at + i * Simd::kRegisterBytes);
  }
  for (int i = 0; i < kRegisters; ++i)
    put<kStream>(dst + at + i * Simd::kRegisterBytes, sums[i]);
}

template <bool kStream, int kNumSrc>
void roof_sum_streams(const std::byte* const* src, int num_src, int64_t bytes, std::byte* dst) {
  const std::byte* near[kNumSrc == 0 ? 1 : kNumSrc];  // a copy that no store can change
  for (int k = 0; k < kNumSrc; ++k)
    near[k] = src[k];
  const std::byte* const* streams = kNumSrc == 0 ? src : near;
  int64_t at = 0;
  for (; at + kRoofBurstLines * kRoofLineBytes <= bytes; at += kRoofBurstLines * kRoofLineBytes)
    roof_sum_burst<kStream, kRoofBurstLines, kNumSrc>(streams, num_src, at, dst);
  for (; at < bytes; at += kRoofLineBytes)
    roof_sum_burst<kStream, 1, kNumSrc>(streams, num_src, at, dst);
}

template <bool kStream>
void roof_sum_any(const std::byte* const* src, int num_src, int64_t bytes, std::byte* dst) {
  constexpr decltype(&roof_sum_streams<kStream, 0>) kStreams[] = {roof_sum_streams<kStream, 0>,
                                                                  roof_sum_streams<kStream, 1>,
                                                                  roof_sum_streams<kStream, 2>,
                                                                  roof_sum_streams<kStream, 3>,
                                                                  roof_sum_streams<kStream, 4>,
                                                                  roof_sum_streams<kStream, 5>,
                                                                  roof_sum_streams<kStream, 6>,
                                                                  roof_sum_streams<kStream, 7>,
                                                                  roof_sum_streams<kStream, 8>};
  kStreams[num_src <= 8 ? num_src : 0](src, num_src, bytes, dst);
  Simd::fence();
}

void roof_sum(
    const std::byte* const* src, int num_src, int64_t bytes, std::byte* dst, StoreMode mode) {
  const auto run = mode == StoreMode::kStreaming ? roof_sum_any<true> : roof_sum_any<false>;
  run(src, num_src, bytes, dst);
}

template <bool kStream>
void roof_copy_lines(const std::byte* src, std::byte* dst, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += Simd::kRegisterBytes)
    put<kStream>(dst + at, load(src + at));
  Simd::fence();
}

void roof_copy(const std::byte* src, std::byte* dst, int64_t bytes, StoreMode mode) {
  const auto run = mode == StoreMode::kStreaming ? roof_copy_lines<true> : roof_copy_lines<false>;
  run(src, dst, bytes);
}

constexpr RoofKernels make_roof_kernels(const char* name) {
  return {name, roof_fan_out, roof_sum, roof_copy};
}

}  // namespace
}  // namespace moe::cpu
