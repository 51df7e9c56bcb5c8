#include "runtime/device_replicas.h"

#include <algorithm>

#include "layout/token_sets.h"
#include "runtime/device_memory.h"

namespace moe::runtime {

namespace {

/// The arrays of ReplicaTable, of any placement with so many slots.
struct TableArrays {
  int32_t* slot_rank;
  int32_t* slot_expert;
  int32_t* expert_begin;
  int32_t* expert_slots;
  int32_t* rank_begin;
  int32_t* shared_slots;
  int32_t* set_of_expert;
  int32_t* shared_experts;

  static TableArrays take(Suballocator& suballocator, int num_ranks, int num_slots) {
    TableArrays arrays{};
    arrays.slot_rank = suballocator.take<int32_t>(num_slots);
    arrays.slot_expert = suballocator.take<int32_t>(num_slots);
    arrays.expert_begin = suballocator.take<int32_t>(num_slots + 1);
    arrays.expert_slots = suballocator.take<int32_t>(num_slots);
    arrays.rank_begin = suballocator.take<int32_t>(num_ranks + 1);
    arrays.shared_slots = suballocator.take<int32_t>(num_slots);
    arrays.set_of_expert = suballocator.take<int32_t>(num_slots);
    arrays.shared_experts = suballocator.take<int32_t>(layout::most_shared_experts(num_slots));
    return arrays;
  }

  void copy(const layout::Replicas& replicas, int num_slots) const {
    const layout::ReplicaTable from = replicas.slots.table();
    const int num_experts = replicas.num_experts();
    std::copy_n(from.slot_rank, num_slots, slot_rank);
    std::copy_n(from.slot_expert, num_slots, slot_expert);
    std::copy_n(from.expert_begin, num_experts + 1, expert_begin);
    std::copy_n(from.expert_slots, from.expert_begin[num_experts], expert_slots);
    std::copy_n(from.rank_begin, from.num_ranks + 1, rank_begin);
    std::copy_n(from.shared_slots, from.rank_begin[from.num_ranks], shared_slots);
    std::ranges::copy(replicas.set_of_expert, set_of_expert);
    std::ranges::copy(replicas.shared_experts, shared_experts);
  }
};

/// Memory that kernels work in. @return its bytes.
int64_t lay_work(Suballocator* suballocator, int num_ranks, int num_slots, kernels::Replicas* to) {
  to->run_begins = suballocator->take<int32_t>(num_slots);
  to->logical = suballocator->take<int32_t>(int64_t{num_ranks} * num_slots);
  to->run_tokens = suballocator->take<int32_t>(int64_t{num_ranks} * num_slots * 2);
  to->set_places = suballocator->take<uint64_t>(num_ranks);
  to->set_words = suballocator->take<int32_t>(num_ranks);
  return suballocator->bytes();
}

}  // namespace

int64_t DeviceReplicas::memory_bytes(int num_ranks, int num_slots) {
  Suballocator suballocator(nullptr);
  TableArrays::take(suballocator, num_ranks, num_slots);
  kernels::Replicas unused;
  return lay_work(&suballocator, num_ranks, num_slots, &unused);
}

std::shared_ptr<const DeviceReplicas> DeviceReplicas::make(const layout::Replicas& replicas,
                                                           int num_slots,
                                                           Device& device,
                                                           const Upload& upload) {
  const int num_ranks = replicas.slots.num_ranks();
  const int num_experts = replicas.num_experts();
  const auto made = std::make_shared<DeviceReplicas>(DeviceReplicas{replicas, nullptr, {}});

  Suballocator sizes(nullptr);
  TableArrays::take(sizes, num_ranks, num_slots);
  const auto staging = device.allocate_host(sizes.bytes());
  Suballocator staged(staging.get());
  TableArrays::take(staged, num_ranks, num_slots).copy(replicas, num_slots);

  made->memory = device.allocate(memory_bytes(num_ranks, num_slots));
  upload(made->memory.get(), staging.get(), sizes.bytes());
  Suballocator suballocator(made->memory.get());
  const TableArrays arrays = TableArrays::take(suballocator, num_ranks, num_slots);
  made->kernels.table = {num_ranks,
                         arrays.slot_rank,
                         arrays.slot_expert,
                         arrays.expert_begin,
                         arrays.expert_slots,
                         arrays.rank_begin,
                         arrays.shared_slots};
  made->kernels.num_experts = num_experts;
  made->kernels.num_local_ranks = replicas.num_local_ranks;
  made->kernels.set_of_expert = arrays.set_of_expert;
  made->kernels.shared_experts = arrays.shared_experts;
  made->kernels.num_shared = static_cast<int32_t>(replicas.shared_experts.size());
  lay_work(&suballocator, num_ranks, num_slots, &made->kernels);
  return made;
}

}  // namespace moe::runtime
