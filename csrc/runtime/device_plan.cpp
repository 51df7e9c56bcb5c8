#include "runtime/device_plan.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "core/error.h"
#include "core/text.h"
#include "layout/token_sets.h"
#include "ops/dispatch.h"
#include "runtime/polling.h"

namespace moe::runtime {

using layout::Row;

namespace {

constexpr int64_t kMostChunks = 512;

/// Elements of a count matrix.
int64_t num_counts(const kernels::Buffer& buffer) {
  return int64_t{buffer.num_ranks} * Row::num_counts(buffer.num_ranks, buffer.num_experts);
}

}  // namespace

int64_t DevicePlan::lay(Suballocator suballocator,
                        const kernels::Buffer& buffer,
                        layout::RowLayout layout,
                        int64_t num_tokens,
                        int64_t num_topk) {
  slots = suballocator.take<int64_t>(
      num_tokens * layout::num_slots_per_token(layout, num_topk, buffer.num_ranks));
  topk_idx = suballocator.take<int64_t>(num_tokens * num_topk);
  device_counts = suballocator.take<int32_t>(num_counts(buffer));
  return suballocator.bytes();
}

std::shared_ptr<DevicePlan> DevicePlan::allocate(const kernels::Buffer& buffer,
                                                 layout::RowLayout layout,
                                                 int64_t num_tokens,
                                                 int64_t num_topk,
                                                 const TakeMemory& take) {
  auto plan = std::make_shared<DevicePlan>();
  plan->memory = take(memory_bytes(buffer, layout, num_tokens, num_topk));
  plan->lay(Suballocator(plan->memory.get()), buffer, layout, num_tokens, num_topk);
  return plan;
}

int64_t DispatchTables::lay(Suballocator suballocator,
                            const kernels::Buffer& buffer,
                            const int32_t* counts) {
  const int64_t num_local = buffer.num_local_experts;
  tables.expert_offsets = suballocator.take<int32_t>(num_local + 1);
  tables.num_tokens_per_expert = suballocator.take<int64_t>(num_local);
  if (counts == nullptr)
    tables.counts = suballocator.take<int32_t>(num_counts(buffer));
  return suballocator.bytes();
}

DispatchTables DispatchTables::allocate(const kernels::Buffer& buffer,
                                        const kernels::Tables& shared,
                                        int32_t* counts,
                                        const TakeMemory& take) {
  DispatchTables made;
  made.tables = shared;
  made.tables.counts = counts;
  made.memory = take(memory_bytes(buffer, counts));
  made.lay(Suballocator(made.memory.get()), buffer, counts);
  return made;
}

std::string find_failure(const ops::PlanHeader& plan) {
  if (plan.verdict == nullptr)
    return "";
  try {
    plan.verdict->join({});
  } catch (...) {
    return concat("this handle has no rows, as its dispatch was found wrong: ",
                  error_text(std::current_exception()));
  }
  return "";
}

void cut_chunks(int tokens_per_chunk, kernels::Choices* choices) {
  const int64_t num_tokens = choices->num_tokens;
  choices->tokens_per_chunk = static_cast<int32_t>(
      std::max<int64_t>(tokens_per_chunk, (num_tokens + kMostChunks - 1) / kMostChunks));
  choices->num_chunks = static_cast<int32_t>((num_tokens + choices->tokens_per_chunk - 1) /
                                             choices->tokens_per_chunk);
}

int64_t lay_chunks(std::byte* memory,
                   const kernels::Buffer& buffer,
                   kernels::Choices* choices,
                   kernels::TokenSets* sets) {
  const int num_totals = buffer.num_experts + buffer.num_ranks;
  Suballocator suballocator(memory);
  choices->chunk_counts = suballocator.take<int32_t>(int64_t{choices->num_chunks} * num_totals);
  choices->place_in_chunk = suballocator.take<int32_t>(
      choices->num_tokens * (sets->base == nullptr ? choices->num_slots : choices->num_topk));
  choices->bad_choice = suballocator.take<int64_t>(choices->num_chunks);
  if (sets->base != nullptr) {
    const int64_t num_words =
        2 * layout::TokenSetMap::words_of(choices->num_tokens) * buffer.num_ranks;
    sets->bound_tokens = suballocator.take<uint32_t>(num_words);
    sets->bound_before = suballocator.take<int32_t>(num_words);
  }
  return suballocator.bytes();
}

int64_t chunk_bytes(const kernels::Buffer& buffer,
                    int tokens_per_chunk,
                    int64_t num_tokens,
                    int64_t num_topk,
                    kernels::TokenSets sets) {
  kernels::Choices choices;
  choices.num_tokens = num_tokens;
  choices.num_topk = choices.num_slots = static_cast<int32_t>(num_topk);  // no layout has more
  cut_chunks(tokens_per_chunk, &choices);
  return lay_chunks(nullptr, buffer, &choices, &sets);
}

std::shared_ptr<DevicePlan> import_plan(const kernels::Buffer& buffer,
                                        Device& device,
                                        Stream& stream,
                                        const ops::Plan& plan) {
  auto made = DevicePlan::allocate(
      buffer, plan.layout(), plan.num_tokens, plan.num_topk, [&device](int64_t bytes) {
        return device.allocate_unset(bytes);
      });
  static_cast<ops::PlanHeader&>(*made) = plan;
  const auto upload = [&](auto* target, const auto& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(values[0]));
    if (bytes == 0)
      return;
    const auto staging = device.allocate_host(bytes);
    std::memcpy(staging.get(), values.data(), static_cast<size_t>(bytes));
    stream.copy(target, staging.get(), bytes);
    await(*stream.record());
  };
  device.activate();
  upload(made->slots, plan.slots);
  upload(made->topk_idx, plan.topk_idx);
  upload(made->device_counts, plan.counts.counts);
  return made;
}

ops::Plan export_plan(Device& device, Stream& stream, const DevicePlan& plan) {
  ops::Plan made;
  static_cast<ops::PlanHeader&>(made) = plan;
  made.slots.resize(static_cast<size_t>(plan.num_tokens * plan.num_slots));
  made.topk_idx.resize(static_cast<size_t>(plan.num_tokens * plan.num_topk));
  const auto download = [&](auto& values, const auto* source) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(values[0]));
    if (bytes == 0)
      return;
    const auto staging = device.allocate_host(bytes);
    stream.copy(staging.get(), source, bytes);
    await(*stream.record());
    std::memcpy(values.data(), staging.get(), static_cast<size_t>(bytes));
  };
  device.activate();
  download(made.slots, plan.slots);
  download(made.topk_idx, plan.topk_idx);
  return made;
}

}  // namespace moe::runtime
