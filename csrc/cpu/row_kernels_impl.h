#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/checksum_lanes.h"
#include "cpu/quantize_impl.h"
#include "cpu/row_kernels.h"
#include "cpu/row_numbers_impl.h"

// The row kernels, written once. A translation unit includes one simd_*.h, which names `Simd`, and
// then this file, and is compiled for that instruction set with -ffp-contract=off. Everything is in
// an unnamed namespace or forced inline, so no code of one instruction set can reach another.

namespace moe::cpu {
namespace {

/// Sums of up to this many rows have a loop of their own, without counting rows.
constexpr int kMaxUnrolledRows = 8;
/// Bytes, of all sources together, that are prefetched into L1 ahead of the sum. The hardware needs
/// several lines of a row to see a stream, and a row is short: at its end the next call's rows are
/// begun.
constexpr int64_t kPrefetchBytes = 6144;

/// Distance at which bytes are fetched ahead of those taken into a checksum.
constexpr int64_t kAbsorbAheadBytes = 8192;

/// Bytes from @p dst to the next cache line, at most @p bytes.
MOE_FORCE_INLINE int64_t bytes_to_line(const std::byte* dst, int64_t bytes) {
  const auto gap = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (kLineBytes - 1));
  return gap < bytes ? gap : bytes;
}

/// Copies whole lines; with kStream, @p dst is aligned to a line.
template <bool kStream>
void copy_lines(const std::byte* src, std::byte* dst, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLineBytes) {
    Simd::Words line[kRegistersPerLine];
    for (int i = 0; i < kRegistersPerLine; ++i)
      line[i] = load(src + at + i * Simd::kRegisterBytes);
    for (int i = 0; i < kRegistersPerLine; ++i)
      put<kStream>(dst + at + i * Simd::kRegisterBytes, line[i]);
  }
}

void copy(const std::byte* src, std::byte* dst, int64_t bytes, StoreMode mode) {
  // A line that is only partly written is stored through the cache: a neighboring row completes
  // it.
  const bool is_streaming = mode == StoreMode::kStreaming;
  const int64_t head = is_streaming ? bytes_to_line(dst, bytes) : 0;
  const int64_t body = (bytes - head) & -kLineBytes;
  std::memcpy(dst, src, head);
  if (is_streaming)
    copy_lines<true>(src + head, dst + head, body);
  else
    copy_lines<false>(src, dst, body);
  std::memcpy(dst + head + body, src + head + body, bytes - head - body);
}

/// Way in which the bytes that a checksum takes are copied on.
enum class Passing { kNone, kCached, kStreaming, kStreamingOdd };

/// Takes rounds into the lanes, in registers of at least 32 bytes: all lanes side by side, each
/// register copied on to @p dst as it is read.
/// @param head  Bytes before the first whole line of @p dst, from which on lines are copied; with
///   kStreamingOdd.
template <Passing kPassing>
void absorb_rounds(const std::byte* src,
                   int64_t bytes,
                   std::byte* dst,
                   int64_t head,
                   const std::byte* next,
                   const uint64_t* before,
                   uint64_t* lanes) {
  constexpr int kRegisters = static_cast<int>(kChecksumRoundBytes) / Simd::kRegisterBytes;
  constexpr int kLanes = kChecksumLanes / kRegisters;
  // Moved one by one: an array that is copied whole stays in memory, where each round's lanes would
  // wait behind streaming stores.
  Simd::Longs now[kRegisters];
#pragma GCC unroll 8
  for (int i = 0; i < kRegisters; ++i)
    std::memcpy(&now[i], before + i * kLanes, sizeof now[i]);
  const int64_t ahead = kAbsorbAheadBytes < bytes ? kAbsorbAheadBytes : bytes;
  // Beside stores, the processor follows adjacent bytes better than it is told.
  const bool is_fetched = kPassing == Passing::kNone || next != src + bytes;
  for (int64_t at = 0; at < bytes; at += kChecksumRoundBytes) {
    const int64_t fetched = at + ahead;
    const std::byte* const from = fetched < bytes ? src + fetched : next + (fetched - bytes);
    for (int64_t line = 0; is_fetched && line < kChecksumRoundBytes; line += kLineBytes)
      __builtin_prefetch(from + line);
    if (kPassing == Passing::kStreamingOdd)
      copy_lines<true>(src + head + at,
                       dst + head + at,
                       kChecksumRoundBytes - (at + kChecksumRoundBytes < bytes ? 0 : kLineBytes));
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) {
      const Simd::Words word = load(src + at + i * Simd::kRegisterBytes);
      if (kPassing == Passing::kCached || kPassing == Passing::kStreaming)
        put<kPassing == Passing::kStreaming>(dst + at + i * Simd::kRegisterBytes, word);
      now[i] = absorb(now[i], reinterpret_cast<Simd::Longs>(word));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRegisters; ++i)
    std::memcpy(lanes + i * kLanes, &now[i], sizeof now[i]);
}

/// The same without wide registers: bytes stay in the cache while few lanes at a time take them.
void absorb_rounds_by_words(const std::byte* src,
                            int64_t bytes,
                            const std::byte* next,
                            const uint64_t* before,
                            uint64_t* lanes) {
  constexpr int kGroup = 8;
  for (int first = 0; first < kChecksumLanes; first += kGroup) {
    uint64_t now[kGroup];
    std::memcpy(now, before + first, sizeof now);
    for (int64_t at = 0; at < bytes; at += kChecksumRoundBytes) {
      __builtin_prefetch(next + at + 8 * first);
      for (int i = 0; i < kGroup; ++i) {
        uint64_t word = 0;
        std::memcpy(&word, src + at + 8 * (first + i), sizeof word);
        now[i] = absorb(now[i], word);
      }
    }
    std::memcpy(lanes + first, now, sizeof now);
  }
}

void absorb_copy(const std::byte* src,
                 std::byte* dst,
                 int64_t bytes,
                 StoreMode mode,
                 const std::byte* next,
                 const uint64_t* before,
                 uint64_t* lanes) {
  if constexpr (Simd::kRegisterBytes < 32) {
    if (dst != nullptr)
      copy(src, dst, bytes, mode);
    absorb_rounds_by_words(src, bytes, next, before, lanes);
  } else if (dst == nullptr) {
    absorb_rounds<Passing::kNone>(src, bytes, nullptr, 0, next, before, lanes);
  } else if (mode == StoreMode::kCached) {
    absorb_rounds<Passing::kCached>(src, bytes, dst, 0, next, before, lanes);
  } else if (const int64_t head = bytes_to_line(dst, bytes); head == 0) {
    absorb_rounds<Passing::kStreaming>(src, bytes, dst, 0, next, before, lanes);
  } else {
    const int64_t tail = kLineBytes - head;
    std::memcpy(dst, src, head);
    absorb_rounds<Passing::kStreamingOdd>(src, bytes, dst, head, next, before, lanes);
    std::memcpy(dst + bytes - tail, src + bytes - tail, tail);
  }
}

void zero(std::byte* dst, int64_t bytes, StoreMode mode) {
  const bool is_streaming = mode == StoreMode::kStreaming;
  const int64_t head = is_streaming ? bytes_to_line(dst, bytes) : 0;
  const int64_t body = is_streaming ? (bytes - head) & -kLineBytes : 0;
  std::memset(dst, 0, head);
  for (int64_t at = head; at < head + body; at += Simd::kRegisterBytes)
    Simd::stream(dst + at, Simd::Words{});
  std::memset(dst + head + body, 0, bytes - head - body);
}

void fan_out(
    const std::byte* src, std::byte* const* dst, int num_dst, int64_t bytes, StoreMode mode) {
  bool is_aligned = true;
  for (int d = 0; d < num_dst; ++d)
    is_aligned = is_aligned && reinterpret_cast<uintptr_t>(dst[d]) % kLineBytes == 0;
  if (mode == StoreMode::kCached || !is_aligned) {
    for (int d = 0; d < num_dst; ++d)
      copy(src, dst[d], bytes, mode);
    return;
  }
  const int64_t body = bytes & -kLineBytes;
  for (int64_t at = 0; at < body; at += kLineBytes) {
    Simd::Words line[kRegistersPerLine];
    for (int i = 0; i < kRegistersPerLine; ++i)
      line[i] = load(src + at + i * Simd::kRegisterBytes);
    for (int d = 0; d < num_dst; ++d)
      for (int i = 0; i < kRegistersPerLine; ++i)
        Simd::stream(dst[d] + at + i * Simd::kRegisterBytes, line[i]);
  }
  for (int d = 0; d < num_dst; ++d)
    std::memcpy(dst[d] + body, src + body, bytes - body);
}

/// The arguments of one `sum_rows`, typed.
template <typename Number>
struct SumRequest {
  const std::byte* const* src;
  const typename Number::Scalar* weights;
  int num_src;
  std::byte* dst;
  const std::byte* const* prefetch;
  int num_prefetch;
};

/// Adds one row's elements, times the row's weight if there are weights, to @p acc.
template <typename Number, bool kWeighted>
MOE_FORCE_INLINE void add_elements(const SumRequest<Number>& request,
                                   int k,
                                   Simd::Words elements,
                                   typename Number::Register* acc) {
  typename Number::Register values[Number::kWidth];
  Number::widen(elements, values);
  for (int j = 0; j < Number::kWidth; ++j) {
    if constexpr (kWeighted)
      values[j] *= broadcast<typename Number::Register>(request.weights[k]);
    acc[j] += values[j];
  }
}

/// Bytes between the line that is summed and the line that is prefetched, in each source.
MOE_FORCE_INLINE int64_t prefetch_distance(int num_src, int64_t row_bytes) {
  const int64_t distance = num_src < 2 ? kPrefetchBytes : kPrefetchBytes / num_src & -kLineBytes;
  return distance < row_bytes ? distance : row_bytes;
}

/// Sums whole lines of [at, end) and returns where it stopped. All sources are read side by side,
/// line by line: each line of the sum is written once and no sum ever leaves its register.
/// @tparam kNumSrc  num_src, or 0 for any number.
template <typename Number, bool kWeighted, bool kStream, int kNumSrc>
int64_t sum_lines(const SumRequest<Number>& request, int64_t at, int64_t end) {
  const int num_src = kNumSrc == 0 ? request.num_src : kNumSrc;
  const std::byte* near[kNumSrc == 0 ? 1 : kNumSrc];  // a copy that no store can change
  for (int k = 0; k < kNumSrc; ++k)
    near[k] = request.src[k];
  const std::byte* const* src = kNumSrc == 0 ? request.src : near;
  const int64_t distance = prefetch_distance(num_src, end - at);
  for (; at + kLineBytes <= end; at += kLineBytes) {
    const int64_t ahead = at + distance;
    if (ahead < end) {
#pragma GCC unroll 8
      for (int k = 0; k < num_src; ++k)
        __builtin_prefetch(src[k] + ahead);
    } else {
      for (int p = 0; p < request.num_prefetch; ++p)
        __builtin_prefetch(request.prefetch[p] + (ahead - end));
    }
    typename Number::Register acc[kRegistersPerLine * Number::kWidth] = {};
#pragma GCC unroll 8
    for (int k = 0; k < num_src; ++k)
      for (int i = 0; i < kRegistersPerLine; ++i)
        add_elements<Number, kWeighted>(
            request, k, load(src[k] + at + i * Simd::kRegisterBytes), acc + i * Number::kWidth);
    for (int i = 0; i < kRegistersPerLine; ++i)
      put<kStream>(request.dst + at + i * Simd::kRegisterBytes,
                   Number::narrow(acc + i * Number::kWidth));
  }
  return at;
}

/// `sum_lines` with the loop made for this number of rows.
template <typename Number, bool kWeighted, bool kStream, int kNumSrc = kMaxUnrolledRows>
int64_t sum_lines_of_any(const SumRequest<Number>& request, int64_t at, int64_t end) {
  if constexpr (kNumSrc > 0) {
    if (request.num_src != kNumSrc)
      return sum_lines_of_any<Number, kWeighted, kStream, kNumSrc - 1>(request, at, end);
  }
  return sum_lines<Number, kWeighted, kStream, kNumSrc>(request, at, end);
}

/// Sums [at, end), less than a line.
template <typename Number, bool kWeighted>
void sum_rest(const SumRequest<Number>& request, int64_t at, int64_t end) {
  while (at < end) {
    const int64_t left = end - at;
    const int64_t bytes = left < Simd::kRegisterBytes ? left : Simd::kRegisterBytes;
    typename Number::Register acc[Number::kWidth] = {};
    for (int k = 0; k < request.num_src; ++k) {
      Simd::Words padded = {};
      std::memcpy(&padded, request.src[k] + at, bytes);
      add_elements<Number, kWeighted>(request, k, padded, acc);
    }
    const Simd::Words sums = Number::narrow(acc);
    std::memcpy(request.dst + at, &sums, bytes);
    at += bytes;
  }
}

template <typename Number, bool kWeighted, bool kStream>
void sum_row(const SumRequest<Number>& request, int64_t bytes) {
  const int64_t head = kStream ? bytes_to_line(request.dst, bytes) : 0;
  sum_rest<Number, kWeighted>(request, 0, head);
  const int64_t at = sum_lines_of_any<Number, kWeighted, kStream>(request, head, bytes);
  sum_rest<Number, kWeighted>(request, at, bytes);
}

/// Adds the sources [begin, end) of @p bytes at @p at, at most a register's, to @p acc.
template <typename Number, bool kWeighted>
MOE_FORCE_INLINE void add_sources(const SumRequest<Number>& request,
                                  int begin,
                                  int end,
                                  int64_t at,
                                  int64_t bytes,
                                  typename Number::Register* acc) {
  for (int k = begin; k < end; ++k) {
    if (bytes == Simd::kRegisterBytes) {
      add_elements<Number, kWeighted>(request, k, load(request.src[k] + at), acc);
      continue;
    }
    Simd::Words padded = {};
    std::memcpy(&padded, request.src[k] + at, bytes);
    add_elements<Number, kWeighted>(request, k, padded, acc);
  }
}

/// The sum of @p bytes at @p at, at most a register's.
template <typename Number, bool kWeighted>
MOE_FORCE_INLINE Simd::Words sum_grouped(const SumRequest<Number>& request,
                                         SourceGroup group,
                                         int64_t at,
                                         int64_t bytes) {
  typename Number::Register acc[Number::kWidth] = {};
  typename Number::Register own[Number::kWidth] = {};
  add_sources<Number, kWeighted>(request, 0, group.begin, at, bytes, acc);
  add_sources<Number, kWeighted>(request, group.begin, group.end, at, bytes, own);
  for (int j = 0; j < Number::kWidth; ++j)
    acc[j] += own[j];
  add_sources<Number, kWeighted>(request, group.end, request.num_src, at, bytes, acc);
  return Number::narrow(acc);
}

template <typename Number, bool kWeighted, bool kStream>
void sum_grouped_row(const SumRequest<Number>& request, SourceGroup group, int64_t bytes) {
  const int64_t head = kStream ? bytes_to_line(request.dst, bytes) : 0;
  const int64_t body_end = head + ((bytes - head) & -kLineBytes);
  const int64_t distance = prefetch_distance(request.num_src, bytes);
  for (int64_t at = 0; at < bytes;) {
    const int64_t end = at < head ? head : at < body_end ? body_end : bytes;
    const int64_t left = end - at;
    const int64_t step = left < Simd::kRegisterBytes ? left : Simd::kRegisterBytes;
    if ((at - head) % kLineBytes == 0 && at + distance < bytes)
      for (int k = 0; k < request.num_src; ++k)
        __builtin_prefetch(request.src[k] + at + distance);
    const Simd::Words sums = sum_grouped<Number, kWeighted>(request, group, at, step);
    if (at >= head && at < body_end)
      put<kStream>(request.dst + at, sums);
    else
      std::memcpy(request.dst + at, &sums, step);
    at += step;
  }
}

template <typename Number>
void sum_grouped_rows_of(const std::byte* const* src,
                         const void* weights,
                         int num_src,
                         SourceGroup group,
                         int64_t hidden,
                         std::byte* dst,
                         StoreMode mode) {
  using Scalar = typename Number::Scalar;
  const SumRequest<Number> request{
      src, static_cast<const Scalar*>(weights), num_src, dst, nullptr, 0};
  const int64_t bytes = hidden * Number::kElementBytes;
  const bool is_streaming = mode == StoreMode::kStreaming;
  if (weights && is_streaming)
    sum_grouped_row<Number, true, true>(request, group, bytes);
  else if (weights)
    sum_grouped_row<Number, true, false>(request, group, bytes);
  else if (is_streaming)
    sum_grouped_row<Number, false, true>(request, group, bytes);
  else
    sum_grouped_row<Number, false, false>(request, group, bytes);
}

void sum_grouped_rows(DType dtype,
                      const std::byte* const* src,
                      const void* weights,
                      int num_src,
                      SourceGroup group,
                      int64_t hidden,
                      std::byte* dst,
                      StoreMode mode) {
  switch (dtype) {
    case DType::kBFloat16:
      return sum_grouped_rows_of<BFloat16>(src, weights, num_src, group, hidden, dst, mode);
    case DType::kFloat16:
      return sum_grouped_rows_of<Float16>(src, weights, num_src, group, hidden, dst, mode);
    case DType::kFloat32:
      return sum_grouped_rows_of<Float32>(src, weights, num_src, group, hidden, dst, mode);
    case DType::kFloat64:
      return sum_grouped_rows_of<Float64>(src, weights, num_src, group, hidden, dst, mode);
    case DType::kBytes:
      break;
  }
  assert(false && "sum_grouped_rows: bytes cannot be added");
}

template <typename Number>
void sum_rows_of(const std::byte* const* src,
                 const void* weights,
                 int num_src,
                 int64_t hidden,
                 std::byte* dst,
                 StoreMode mode,
                 const std::byte* const* prefetch,
                 int num_prefetch) {
  using Scalar = typename Number::Scalar;
  const SumRequest<Number> request{src,
                                   static_cast<const Scalar*>(weights),
                                   num_src,
                                   dst,
                                   prefetch,
                                   prefetch ? num_prefetch : 0};
  const int64_t bytes = hidden * Number::kElementBytes;
  const bool is_streaming = mode == StoreMode::kStreaming;
  if (weights && is_streaming)
    sum_row<Number, true, true>(request, bytes);
  else if (weights)
    sum_row<Number, true, false>(request, bytes);
  else if (is_streaming)
    sum_row<Number, false, true>(request, bytes);
  else
    sum_row<Number, false, false>(request, bytes);
}

void sum_rows(DType dtype,
              const std::byte* const* src,
              const void* weights,
              int num_src,
              int64_t hidden,
              std::byte* dst,
              StoreMode mode,
              const std::byte* const* prefetch,
              int num_prefetch) {
  switch (dtype) {
    case DType::kBFloat16:
      return sum_rows_of<BFloat16>(
          src, weights, num_src, hidden, dst, mode, prefetch, num_prefetch);
    case DType::kFloat16:
      return sum_rows_of<Float16>(src, weights, num_src, hidden, dst, mode, prefetch, num_prefetch);
    case DType::kFloat32:
      return sum_rows_of<Float32>(src, weights, num_src, hidden, dst, mode, prefetch, num_prefetch);
    case DType::kFloat64:
      return sum_rows_of<Float64>(src, weights, num_src, hidden, dst, mode, prefetch, num_prefetch);
    case DType::kBytes:
      break;
  }
  assert(false && "sum_rows: bytes cannot be added");
}

/// `scale_and_dot` of kDotLanes elements; adds their products to @p acc.
template <typename Number>
MOE_FORCE_INLINE void scale_and_dot_group(std::byte* gradient,
                                          const std::byte* value,
                                          typename Number::Register weight,
                                          typename Number::Register* acc) {
  for (int i = 0; i < kDotRegisters<Number>; ++i) {
    typename Number::Register gradients[Number::kWidth];
    typename Number::Register values[Number::kWidth];
    Number::widen(load(gradient + i * Simd::kRegisterBytes), gradients);
    Number::widen(load(value + i * Simd::kRegisterBytes), values);
    for (int j = 0; j < Number::kWidth; ++j) {
      acc[i * Number::kWidth + j] += gradients[j] * values[j];
      gradients[j] *= weight;
    }
    store(gradient + i * Simd::kRegisterBytes, Number::narrow(gradients));
  }
}

template <typename Number>
double scale_and_dot_of(std::byte* gradient,
                        const std::byte* value,
                        double weight,
                        int64_t hidden) {
  using Scalar = typename Number::Scalar;
  constexpr int64_t kGroupBytes = kDotLanes * Number::kElementBytes;
  const int64_t bytes = hidden * Number::kElementBytes;
  const int64_t body = bytes - bytes % kGroupBytes;
  const auto scale = broadcast<typename Number::Register>(static_cast<Scalar>(weight));
  typename Number::Register acc[kDotRegisters<Number> * Number::kWidth] = {};
  for (int64_t at = 0; at < body; at += kGroupBytes)
    scale_and_dot_group<Number>(gradient + at, value + at, scale, acc);
  if (body < bytes) {
    // The padding adds +0.0 to its lanes, and no lane is ever -0.0: it changes nothing.
    std::byte gradients[kGroupBytes] = {};
    std::byte values[kGroupBytes] = {};
    std::memcpy(gradients, gradient + body, bytes - body);
    std::memcpy(values, value + body, bytes - body);
    scale_and_dot_group<Number>(gradients, values, scale, acc);
    std::memcpy(gradient + body, gradients, bytes - body);
  }
  return add_lanes<Number>(acc);
}

double scale_and_dot(
    DType dtype, std::byte* gradient, const std::byte* value, double weight, int64_t hidden) {
  switch (dtype) {
    case DType::kBFloat16:
      return scale_and_dot_of<BFloat16>(gradient, value, weight, hidden);
    case DType::kFloat16:
      return scale_and_dot_of<Float16>(gradient, value, weight, hidden);
    case DType::kFloat32:
      return scale_and_dot_of<Float32>(gradient, value, weight, hidden);
    case DType::kFloat64:
      return scale_and_dot_of<Float64>(gradient, value, weight, hidden);
    case DType::kBytes:
      break;
  }
  assert(false && "scale_and_dot: bytes cannot be multiplied");
  return 0.0;
}

void store_fence() {
  Simd::fence();
}

constexpr RowKernels make_row_kernels(const char* name) {
  return {name,
          fan_out,
          sum_rows,
          sum_grouped_rows,
          scale_and_dot,
          copy,
          absorb_copy,
          zero,
          store_fence,
          quantize_row};
}

}  // namespace
}  // namespace moe::cpu
