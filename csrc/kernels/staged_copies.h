#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "device/primitives.h"
#include "device/warp.h"

// Copies of a warp through shared memory.

namespace moe::kernels {

/// Copies through shared memory, one bulk copy in and one out. Lane 0 acts; all lanes call.
class StagedCopies {
 public:
  static constexpr int64_t kStageBytes = 4096;
  static constexpr int kNumStages = 4;
  /// Loads of a warp under way; the other stages are being stored.
  static constexpr int kNumLoads = 2;

  /// Shared memory of a block of @p num_warps: their stages, then as many mbarriers.
  static MOE_HOST_DEVICE constexpr int64_t shared_bytes(int num_warps) {
    return int64_t{num_warps} * kNumStages *
           (kStageBytes + static_cast<int64_t>(sizeof(device::MBarrier)));
  }

  MOE_DEVICE StagedCopies() {
    std::byte* const shared = device::shared_memory();
    const int first = device::warp_idx() * kNumStages;
    stages_ = shared + first * kStageBytes;
    mbarriers_ = reinterpret_cast<device::MBarrier*>(shared + int64_t{device::num_warps()} *
                                                                  kNumStages * kStageBytes) +
                 first;
    if (device::lane_idx() == 0) {
      for (int stage = 0; stage < kNumStages; ++stage)
        device::init_mbarrier(mbarriers_ + stage, 1);
      device::fence_mbarrier_init();
      // Sources were written, or acquired, by the kernels before.
      device::fence_proxy_async();
    }
  }

  /// Begins a copy of at most kStageBytes.
  MOE_DEVICE void push(const std::byte* source, std::byte* target, int64_t bytes) {
    if (num_loading_ == kNumLoads)
      store_oldest();
    if (device::lane_idx() == 0) {
      // The former content of this stage has left it: at most the stores behind that one may be
      // pending.
      device::await_bulk_reads<kNumStages - kNumLoads>();
      device::MBarrier* const mbarrier = mbarriers_ + load_stage_;
      device::arrive_expect(mbarrier, static_cast<uint32_t>(bytes));
      device::bulk_load(
          stages_ + load_stage_ * kStageBytes, source, static_cast<uint32_t>(bytes), mbarrier);
    }
    // The oldest comes first.
    if (num_loading_ == 0) {
      targets_[0] = target;
      bytes_[0] = bytes;
    } else {
      targets_[1] = target;
      bytes_[1] = bytes;
    }
    ++num_loading_;
    load_stage_ = (load_stage_ + 1) % kNumStages;
  }

  MOE_DEVICE void store_all() {
    while (num_loading_ > 0)
      store_oldest();
  }

  /// Every target is written. Before the block ends.
  MOE_DEVICE void finish() {
    store_all();
    if (device::lane_idx() == 0)
      device::await_bulk_stores<0>();
  }

 private:
  static_assert(kNumLoads == 2, "the oldest load and one behind it");

  MOE_DEVICE void store_oldest() {
    if (device::lane_idx() == 0) {
      while (!device::try_wait(mbarriers_ + store_stage_, parity_)) {
      }
      device::bulk_store(
          targets_[0], stages_ + store_stage_ * kStageBytes, static_cast<uint32_t>(bytes_[0]));
      device::commit_bulk_stores();
    }
    targets_[0] = targets_[1];
    bytes_[0] = bytes_[1];
    --num_loading_;
    store_stage_ = (store_stage_ + 1) % kNumStages;
    parity_ ^= store_stage_ == 0 ? 1 : 0;
  }

  std::byte* stages_;
  device::MBarrier* mbarriers_;
  int load_stage_ = 0;
  int store_stage_ = 0;
  uint32_t parity_ = 0;
  int num_loading_ = 0;
  std::byte* targets_[kNumLoads] = {};
  int64_t bytes_[kNumLoads] = {};
};

}  // namespace moe::kernels
