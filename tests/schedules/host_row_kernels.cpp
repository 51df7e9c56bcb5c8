#include "core/sync.h"
#include "cpu/row_kernels_tables.h"
#include "cpu/this_machine.h"
#include "schedules/host_threads.h"

// What cpu/this_machine.cpp is elsewhere: the machine is what a schedule says, and its row kernels
// are the portable ones, with every row they read and write told to the checker. Whatever is stored
// past the caches counts as such whole, also lines that the kernels store through them.

namespace moe::cpu {

namespace {

using simt::checker::HostMemory;
using simt::checker::HostThreads;

/// Before bytes are written. @return false where the thread is not to touch anything.
bool note_store(std::byte* dst, int64_t bytes, StoreMode mode) {
  HostThreads* const threads = HostThreads::current();
  if (threads == nullptr || !threads->memory().is_shared(dst))
    return true;
  if (!threads->step(true))
    return false;
  threads->memory().write(
      threads->thread(),
      dst,
      static_cast<size_t>(bytes),
      mode == StoreMode::kStreaming ? HostMemory::Manner::kStreaming : HostMemory::Manner::kPlain);
  return true;
}

void note_load(const std::byte* src, int64_t bytes) {
  sync::note_read(src, static_cast<size_t>(bytes));
}

/// Rows of peers, see sync::pull_shared().
void note_pull(const std::byte* src, int64_t bytes) {
  HostThreads* const threads = HostThreads::current();
  if (threads != nullptr && threads->memory().is_shared(src) && threads->step(true))
    threads->memory().pull(threads->thread(), src, static_cast<size_t>(bytes));
}

void fan_out(
    const std::byte* src, std::byte* const* dst, int num_dst, int64_t bytes, StoreMode mode) {
  note_load(src, bytes);
  for (int d = 0; d < num_dst; ++d)
    if (note_store(dst[d], bytes, mode))
      kPortableRowKernels.fan_out(src, dst + d, 1, bytes, mode);
}

void sum_rows(DType dtype,
              const std::byte* const* src,
              const void* weights,
              int num_src,
              int64_t hidden,
              std::byte* dst,
              StoreMode mode,
              const std::byte* const* /*prefetch*/,
              int /*num_prefetch*/) {
  const int64_t bytes = hidden * element_bytes(dtype);
  for (int k = 0; k < num_src; ++k)
    note_pull(src[k], bytes);
  if (note_store(dst, bytes, mode))
    kPortableRowKernels.sum_rows(dtype, src, weights, num_src, hidden, dst, mode, nullptr, 0);
}

void sum_grouped_rows(DType dtype,
                      const std::byte* const* src,
                      const void* weights,
                      int num_src,
                      SourceGroup group,
                      int64_t hidden,
                      std::byte* dst,
                      StoreMode mode) {
  const int64_t bytes = hidden * element_bytes(dtype);
  for (int k = 0; k < num_src; ++k)
    note_pull(src[k], bytes);
  if (note_store(dst, bytes, mode))
    kPortableRowKernels.sum_grouped_rows(dtype, src, weights, num_src, group, hidden, dst, mode);
}

double scale_and_dot(
    DType dtype, std::byte* gradient, const std::byte* value, double weight, int64_t hidden) {
  const int64_t bytes = hidden * element_bytes(dtype);
  note_load(gradient, bytes);
  note_load(value, bytes);
  if (!note_store(gradient, bytes, StoreMode::kCached))
    return 0.0;
  return kPortableRowKernels.scale_and_dot(dtype, gradient, value, weight, hidden);
}

void copy(const std::byte* src, std::byte* dst, int64_t bytes, StoreMode mode) {
  // A window is copied whole, with what lies between its regions.
  HostThreads* const threads = HostThreads::current();
  if (threads != nullptr && threads->memory().is_shared(src) && threads->step(true))
    threads->memory().read_loosely(threads->thread(), src, static_cast<size_t>(bytes));
  if (note_store(dst, bytes, mode))
    kPortableRowKernels.copy(src, dst, bytes, mode);
}

void absorb_copy(const std::byte* src,
                 std::byte* dst,
                 int64_t bytes,
                 StoreMode mode,
                 const std::byte* next,
                 const uint64_t* before,
                 uint64_t* lanes) {
  if (dst != nullptr)
    copy(src, dst, bytes, mode);
  kPortableRowKernels.absorb_copy(src, nullptr, bytes, mode, next, before, lanes);
}

void zero(std::byte* dst, int64_t bytes, StoreMode mode) {
  if (note_store(dst, bytes, mode))
    kPortableRowKernels.zero(dst, bytes, mode);
}

void store_fence() {
  if (HostThreads* const threads = HostThreads::current(); threads != nullptr && threads->step())
    threads->memory().store_fence(threads->thread());
}

void quantize_row(const RowQuantization& quantization,
                  const std::byte* src,
                  std::byte* const* dst,
                  int num_dst,
                  void* scales,
                  StoreMode mode) {
  note_load(src, quantization.hidden * element_bytes(quantization.dtype));
  for (int d = 0; d < num_dst; ++d)
    if (note_store(dst[d], quantization.hidden, mode))
      kPortableRowKernels.quantize_row(quantization, src, dst + d, 1, scales, mode);
}

constexpr RowKernels kCheckedRowKernels = {"checked",
                                           fan_out,
                                           sum_rows,
                                           sum_grouped_rows,
                                           scale_and_dot,
                                           copy,
                                           absorb_copy,
                                           zero,
                                           store_fence,
                                           quantize_row};

}  // namespace

const RowKernels& best_row_kernels() {
  return kCheckedRowKernels;
}

int64_t last_level_cache_bytes() {
  const HostThreads* const threads = HostThreads::current();
  return (threads == nullptr ? HostThreads::Options{} : threads->options()).cache_bytes;
}

}  // namespace moe::cpu
