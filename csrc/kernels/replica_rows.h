#pragma once

#include <cstdint>

#include "device/primitives.h"
#include "kernels/replicas.h"
#include "layout/replica_sharing.h"

// Replicas that take the rows of this dispatch: what share_rows() of layout/replicas.h says, by
// all threads of one block.

namespace moe::kernels {

/// Accesses by which the functions of layout/ read and write in a kernel.
struct DeviceMemory {
  template <typename T>
  MOE_DEVICE static T load(const T* from) {
    return device::load(from);
  }
  template <typename T>
  MOE_DEVICE static void store(T* to, T value) {
    device::store(to, value);
  }
};

/// Shared memory of that, behind which nothing stays.
///
/// Byte map, R ranks and S slots: int64 [S] rows; int64 [R] rows; int32 [RankLeveling::num_words];
///   uint8 [R] is_masked.
struct ReplicaSharedMap {
  using Leveling = layout::RankLeveling<DeviceMemory>;

  int64_t rank_rows;
  int64_t words;
  int64_t is_masked;
  int64_t bytes;

  MOE_HOST_DEVICE static ReplicaSharedMap make(int num_ranks, int num_slots) {
    ReplicaSharedMap map{};
    map.rank_rows = int64_t{8} * num_slots;
    map.words = map.rank_rows + int64_t{8} * num_ranks;
    map.is_masked = map.words + 4 * Leveling::num_words(num_ranks);
    map.bytes = map.is_masked + num_ranks;
    return map;
  }
};

/// Arguments of sharing.
struct SharedOut {
  Replicas replicas;
  const int32_t* first_of_rank;  ///< Buffer::first_of_rank
  int32_t num_slots;
  int32_t rank_idx;
  bool keeps_marks;   ///< whether marks of masks stay, which low latency goes by afterwards
  int32_t* counts;    ///< Tables::counts, of logical experts
  std::byte* memory;  ///< shared, see ReplicaSharedMap
};

/// Turns the counts of logical experts into counts of slots, and finds Replicas::run_begins. All
/// threads call. Ends with a barrier.
///
/// A thread takes an expert at a time; one of them levels the ranks.
MOE_DEVICE void share_replicas(const SharedOut& told) {
  const int num_ranks = told.replicas.table.num_ranks;
  const int num_experts = told.replicas.num_experts;
  const ReplicaSharedMap map = ReplicaSharedMap::make(num_ranks, told.num_slots);
  auto* const slot_rows = reinterpret_cast<int64_t*>(told.memory);
  auto* const rank_rows = reinterpret_cast<int64_t*>(told.memory + map.rank_rows);
  auto* const is_masked = reinterpret_cast<uint8_t*>(told.memory + map.is_masked);
  const layout::ReplicaSharing<DeviceMemory> sharing{told.replicas.table,
                                                     num_experts,
                                                     told.num_slots,
                                                     told.replicas.num_local_ranks,
                                                     is_masked,
                                                     slot_rows,
                                                     told.replicas.logical,
                                                     told.counts};
  const auto masks = [&](int rank_idx) { return device::load(is_masked + rank_idx) != 0; };
  const int begin = device::thread_idx();
  const int step = device::num_threads();
#pragma unroll 1
  for (int i = begin; i < num_ranks * told.num_slots; i += step) {
    int32_t* const count = sharing.counts_of(i / told.num_slots) + i % told.num_slots;
    if (i % told.num_slots < num_experts)
      device::store(
          told.replicas.logical + int64_t{i / told.num_slots} * num_experts + i % told.num_slots,
          device::load(count));
    device::store(count, int32_t{0});
  }
#pragma unroll 1
  for (int slot = begin; slot < told.num_slots; slot += step)
    device::store(slot_rows + slot, int64_t{0});
#pragma unroll 1
  for (int rank_idx = begin; rank_idx < num_ranks; rank_idx += step)
    device::store(is_masked + rank_idx, static_cast<uint8_t>(sharing.finds_mask(rank_idx)));
  device::sync_block();
#pragma unroll 1
  for (int expert_idx = begin; expert_idx < num_experts; expert_idx += step)
#pragma unroll 1
    for (int src_rank = 0; src_rank < num_ranks; ++src_rank)
      if (!masks(src_rank))
        sharing.place_at_home(src_rank, expert_idx);
  device::sync_block();
#pragma unroll 1
  for (int rank_idx = begin; rank_idx < num_ranks; rank_idx += step) {
    int64_t num_rows = 0;
    const int end = device::load_constant(told.first_of_rank + rank_idx + 1);
#pragma unroll 1
    for (int slot = device::load_constant(told.first_of_rank + rank_idx); slot < end; ++slot)
      num_rows += device::load(slot_rows + slot);
    device::store(rank_rows + rank_idx, masks(rank_idx) ? int64_t{-1} : num_rows);
  }
  device::sync_block();
  if (begin == 0)
    ReplicaSharedMap::Leveling{told.replicas.table,
                               slot_rows,
                               rank_rows,
                               reinterpret_cast<int32_t*>(told.memory + map.words)}
        .run();
  device::sync_block();
#pragma unroll 1
  for (int expert_idx = begin; expert_idx < num_experts; expert_idx += step) {
    sharing.share(expert_idx);
    int32_t before = 0;
    const int end = device::load_constant(told.replicas.table.expert_begin + expert_idx + 1);
#pragma unroll 1
    for (int j = device::load_constant(told.replicas.table.expert_begin + expert_idx); j < end;
         ++j) {
      const int32_t slot = device::load_constant(told.replicas.table.expert_slots + j);
      device::store(told.replicas.run_begins + slot, before);
      before += device::load(sharing.counts_of(told.rank_idx) + slot);
    }
  }
  device::sync_block();
#pragma unroll 1
  for (int i = begin; i < num_ranks * num_ranks; i += step) {
    int32_t* const counts = sharing.counts_of(i / num_ranks);
    int32_t* const to_rank = counts + told.num_slots + i % num_ranks;
    if (device::load(to_rank) == layout::CountMatrix::kMasked && told.keeps_marks)
      continue;
    int32_t num_rows = 0;
    const int end = device::load_constant(told.first_of_rank + i % num_ranks + 1);
#pragma unroll 1
    for (int slot = device::load_constant(told.first_of_rank + i % num_ranks); slot < end; ++slot)
      num_rows += device::load(counts + slot);
    device::store(to_rank, num_rows);
  }
  device::sync_block();
}

}  // namespace moe::kernels
