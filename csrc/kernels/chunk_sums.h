#pragma once

#include <cstdint>

#include "device/primitives.h"
#include "kernels/exchange.h"

namespace moe::kernels {

/// Sums over chunks of one rank's choices, by one block: columns side by side, and where threads
/// are left, a column's chunks in groups.
class ChunkSums {
 public:
  /// @param shared  an int32 per thread, kept between the two steps
  MOE_DEVICE ChunkSums(const Choices& choices, int num_columns, int32_t* shared)
      : choices_(choices), num_columns_(num_columns), shared_(shared) {
    num_groups_ = device::num_threads() / num_columns;
    num_groups_ = num_groups_ > 1 ? num_groups_ : 1;
    chunks_per_group_ = (choices.num_chunks + num_groups_ - 1) / num_groups_;
  }

  /// First step: the sums of whole columns. Ends with a barrier.
  MOE_DEVICE void add_up(int32_t* totals) const {
#pragma unroll 1
    for (int i = device::thread_idx(); i < num_groups_ * num_columns_; i += device::num_threads()) {
      int32_t sum = 0;
      walk(i, [&](int32_t*, int32_t count) { sum += count; });
      device::store(num_groups_ == 1 ? totals + i : shared_ + i, sum);
    }
    device::sync_block();
    if (num_groups_ == 1)
      return;
#pragma unroll 1
    for (int i = device::thread_idx(); i < num_columns_; i += device::num_threads())
      device::store(totals + i, sum_of_groups(i, num_groups_));
    device::sync_block();
  }

  /// Second step: every count becomes the sum of those of earlier chunks.
  MOE_DEVICE void spread() const {
#pragma unroll 1
    for (int i = device::thread_idx(); i < num_groups_ * num_columns_; i += device::num_threads()) {
      int32_t before = num_groups_ == 1 ? 0 : sum_of_groups(i % num_columns_, i / num_columns_);
      walk(i, [&](int32_t* place, int32_t count) {
        device::store(place, before);
        before += count;
      });
    }
  }

 private:
  /// Sum of a column in groups below @p end_group.
  MOE_DEVICE int32_t sum_of_groups(int column, int end_group) const {
    int32_t sum = 0;
#pragma unroll 1
    for (int group = 0; group < end_group; ++group)
      sum += device::load(shared_ + group * num_columns_ + column);
    return sum;
  }

  /// use(place, count) for the chunks of part @p i, in order; several loads are under way at a
  /// time.
  template <typename Use>
  MOE_DEVICE void walk(int i, const Use& use) const {
    constexpr int kBatch = 8;
    const int column = i % num_columns_;
    const int first = i / num_columns_ * chunks_per_group_;
    int end = first + chunks_per_group_;
    end = end < choices_.num_chunks ? end : choices_.num_chunks;
#pragma unroll 1
    for (int chunk = first; chunk < end; chunk += kBatch) {
      int32_t* const place = choices_.chunk_counts + int64_t{chunk} * num_columns_ + column;
      int32_t counts[kBatch] = {};
      for (int c = 0; c < kBatch; ++c)
        if (chunk + c < end)
          counts[c] = device::load(place + int64_t{c} * num_columns_);
      for (int c = 0; c < kBatch; ++c)
        if (chunk + c < end)
          use(place + int64_t{c} * num_columns_, counts[c]);
    }
  }

  const Choices& choices_;
  int num_columns_;
  int num_groups_;
  int chunks_per_group_;
  int32_t* shared_;
};

}  // namespace moe::kernels
