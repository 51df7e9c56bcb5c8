#pragma once

#include <cstddef>
#include <cstdint>

#include "host/roof.h"
#include "host/row_numbers_impl.h"

// The roofs, written once; see row_kernels_impl.h for how it is compiled. They share no loop with
// the row kernels, so that a slow kernel cannot lower its own roof.

namespace moe::host {
namespace {

constexpr int64_t kRoofLineBytes = 64;
constexpr int kRoofRegisters = static_cast<int>(kRoofLineBytes) / Simd::kRegisterBytes;

void roof_fan_out(const std::byte* src,
                  int64_t num_rows,
                  int64_t row_bytes,
                  std::byte* const* dst,
                  int num_copies) {
  for (int64_t at = 0; at < num_rows * row_bytes; at += kRoofLineBytes) {
    Simd::Words line[kRoofRegisters];
    for (int i = 0; i < kRoofRegisters; ++i)
      line[i] = load(src + at + i * Simd::kRegisterBytes);
    for (int c = 0; c < num_copies; ++c)
      for (int i = 0; i < kRoofRegisters; ++i)
        Simd::stream(dst[c] + at + i * Simd::kRegisterBytes, line[i]);
  }
  Simd::fence();
}

void roof_sum(const std::byte* const* src, int num_src, int64_t bytes, std::byte* dst) {
  for (int64_t at = 0; at < bytes; at += kRoofLineBytes) {
    Simd::Words line[kRoofRegisters] = {};
    for (int k = 0; k < num_src; ++k)
      for (int i = 0; i < kRoofRegisters; ++i)
        line[i] += load(src[k] + at + i * Simd::kRegisterBytes);
    for (int i = 0; i < kRoofRegisters; ++i)
      Simd::stream(dst + at + i * Simd::kRegisterBytes, line[i]);
  }
  Simd::fence();
}

void roof_copy(const std::byte* src, std::byte* dst, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += Simd::kRegisterBytes)
    Simd::stream(dst + at, load(src + at));
  Simd::fence();
}

constexpr RoofKernels make_roof_kernels(const char* name) {
  return {name, roof_fan_out, roof_sum, roof_copy};
}

}  // namespace
}  // namespace moe::host
