#pragma once

#include <cstddef>
#include <cstdint>

#include "core/math.h"
#include "layout/row.h"

namespace moe::layout {

/// Activity of a rank on a buffer, for peers that wait for it and want to say why.
///
/// Byte map (64 bytes): [0, 8) progress, raised while it works; [8, 12) waiting_for, rank + 1 or 0;
///   [12, 16) phase; [16, 24) waiting_epoch and [24, 28) waiting_phase, which flag it waits for;
///   [28, 32) core, where it ran when it entered its operation; rest unused.
struct alignas(64) Activity {
  uint64_t progress;
  uint32_t waiting_for;
  int32_t phase;
  uint64_t waiting_epoch;
  int32_t waiting_phase;
  uint32_t core;
};
static_assert(sizeof(Activity) == 64);

/// A flag of one peer, alone on its cache line.
struct alignas(64) Flag {
  uint64_t epoch;
};
static_assert(sizeof(Flag) == 64);

/// A second offer, made by a rank that was short.
///
/// Byte map (64 bytes): [0, 8) epoch, stored last; [8, 32) offer, 0 bytes if memory could not be
///   had; [32, 48) needed and available bytes.
struct alignas(64) SecondOffer {
  uint64_t epoch;
  Offer offer;
  uint64_t needed_bytes;
  uint64_t available_bytes;
};
static_assert(sizeof(SecondOffer) == 64);

/// Control area of one buffer on one rank: peers write rows, offers and flags into it.
///
/// Byte map, R ranks and a ring of `depth` entries:
///   [0, 64)          activity of the owner
///   [64, +64 R)      closed: peer p raises closed[p].epoch when it destroys its buffer
///   then per entry:  R rows of `row_stride`, R second offers, R done flags
class Workspace {
 public:
  Workspace() = default;
  MOE_HOST_DEVICE Workspace(std::byte* base, int num_ranks, int num_experts, int depth)
      : base_(base),
        num_ranks_(num_ranks),
        depth_(depth),
        row_stride_(Row::stride(num_ranks, num_experts)) {}

  MOE_HOST_DEVICE static int64_t bytes(int num_ranks, int num_experts, int depth) {
    return entry_offset(num_ranks, 0, 0) +
           depth * entry_bytes(num_ranks, Row::stride(num_ranks, num_experts));
  }

  MOE_HOST_DEVICE std::byte* base() const { return base_; }
  MOE_HOST_DEVICE Activity& activity() const { return *reinterpret_cast<Activity*>(base_); }
  MOE_HOST_DEVICE Flag& closed(int rank_idx) const { return at<Flag>(64 + int64_t{64} * rank_idx); }
  MOE_HOST_DEVICE Row& row(uint64_t epoch, int rank_idx) const {
    return at<Row>(entry(epoch) + rank_idx * row_stride_);
  }
  MOE_HOST_DEVICE SecondOffer& second_offer(uint64_t epoch, int rank_idx) const {
    return at<SecondOffer>(entry(epoch) + num_ranks_ * row_stride_ + int64_t{64} * rank_idx);
  }
  MOE_HOST_DEVICE Flag& done(uint64_t epoch, int rank_idx) const {
    return at<Flag>(entry(epoch) + num_ranks_ * (row_stride_ + 64) + int64_t{64} * rank_idx);
  }

  /// Entry of a ring of @p depth that an epoch uses.
  MOE_HOST_DEVICE_CALLED static int64_t entry_idx(uint64_t epoch, int depth) {
    return static_cast<int64_t>(epoch % static_cast<uint64_t>(depth));
  }

 private:
  template <typename T>
  MOE_HOST_DEVICE T& at(int64_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }
  MOE_HOST_DEVICE static int64_t entry_bytes(int num_ranks, int64_t row_stride) {
    return num_ranks * (row_stride + 64 + 64);
  }
  MOE_HOST_DEVICE static int64_t entry_offset(int num_ranks,
                                              int64_t entry_idx,
                                              int64_t row_stride) {
    return 64 + int64_t{64} * num_ranks + entry_idx * entry_bytes(num_ranks, row_stride);
  }
  MOE_HOST_DEVICE int64_t entry(uint64_t epoch) const {
    return entry_offset(num_ranks_, entry_idx(epoch, depth_), row_stride_);
  }

  std::byte* base_ = nullptr;
  int num_ranks_ = 0;
  int depth_ = 1;
  int64_t row_stride_ = 0;
};

}  // namespace moe::layout
