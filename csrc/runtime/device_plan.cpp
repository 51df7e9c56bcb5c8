#include "runtime/device_plan.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "core/error.h"
#include "core/text.h"
#include "ops/dispatch.h"

namespace moe::runtime {

using layout::Row;

namespace {

std::shared_ptr<std::byte> allocate_memory(DeviceEndpoint& endpoint,
                                           int64_t bytes,
                                           Contents contents,
                                           int64_t num_rows) {
  return contents == Contents::kCaptured ? endpoint.take_captured(num_rows, bytes)
                                         : endpoint.device().allocate_unset(bytes);
}

}  // namespace

int64_t DevicePlan::lay(Suballocator suballocator,
                        const DeviceEndpoint& endpoint,
                        layout::RowLayout layout,
                        int64_t num_tokens,
                        int64_t num_topk) {
  const int num_ranks = endpoint.num_ranks();
  slots = suballocator.take<int64_t>(num_tokens *
                                     layout::num_slots_per_token(layout, num_topk, num_ranks));
  topk_idx = suballocator.take<int64_t>(num_tokens * num_topk);
  device_counts = suballocator.take<int32_t>(
      int64_t{num_ranks} * Row::num_counts(num_ranks, endpoint.config().num_experts));
  return suballocator.bytes();
}

std::shared_ptr<DevicePlan> DevicePlan::allocate(DeviceEndpoint& endpoint,
                                                 layout::RowLayout layout,
                                                 int64_t num_tokens,
                                                 int64_t num_topk,
                                                 Contents contents,
                                                 int64_t num_rows) {
  auto plan = std::make_shared<DevicePlan>();
  plan->memory = allocate_memory(
      endpoint, memory_bytes(endpoint, layout, num_tokens, num_topk), contents, num_rows);
  plan->lay(Suballocator(plan->memory.get()), endpoint, layout, num_tokens, num_topk);
  return plan;
}

int64_t DispatchTables::lay(Suballocator suballocator,
                            const DeviceEndpoint& endpoint,
                            const int32_t* counts) {
  const int num_ranks = endpoint.num_ranks();
  const int64_t num_local = endpoint.num_local_experts();
  tables.expert_offsets = suballocator.take<int32_t>(num_local + 1);
  tables.num_tokens_per_expert = suballocator.take<int64_t>(num_local);
  if (counts == nullptr)
    tables.counts = suballocator.take<int32_t>(
        int64_t{num_ranks} * Row::num_counts(num_ranks, endpoint.config().num_experts));
  return suballocator.bytes();
}

DispatchTables DispatchTables::allocate(DeviceEndpoint& endpoint,
                                        int32_t* counts,
                                        Contents contents,
                                        int64_t num_rows) {
  DispatchTables made;
  made.tables = endpoint.tables();
  made.tables.counts = counts;
  made.memory = allocate_memory(endpoint, memory_bytes(endpoint, counts), contents, num_rows);
  made.lay(Suballocator(made.memory.get()), endpoint, counts);
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

std::shared_ptr<DevicePlan> import_plan(DeviceEndpoint& endpoint, const ops::Plan& plan) {
  auto made = DevicePlan::allocate(
      endpoint, plan.layout(), plan.num_tokens, plan.num_topk, Contents::kUnset);
  static_cast<ops::PlanHeader&>(*made) = plan;
  Stream& stream = endpoint.stream();
  const auto upload = [&](auto* target, const auto& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(values[0]));
    if (bytes == 0)
      return;
    const auto staging = endpoint.device().allocate_host(bytes);
    std::memcpy(staging.get(), values.data(), static_cast<size_t>(bytes));
    stream.copy(target, staging.get(), bytes);
    endpoint.synchronize();
  };
  endpoint.device().activate();
  upload(made->slots, plan.slots);
  upload(made->topk_idx, plan.topk_idx);
  upload(made->device_counts, plan.counts.counts);
  return made;
}

ops::Plan export_plan(DeviceEndpoint& endpoint, const DevicePlan& plan) {
  ops::Plan made;
  static_cast<ops::PlanHeader&>(made) = plan;
  made.slots.resize(static_cast<size_t>(plan.num_tokens * plan.num_slots));
  made.topk_idx.resize(static_cast<size_t>(plan.num_tokens * plan.num_topk));
  const auto download = [&](auto& values, const auto* source) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(values[0]));
    if (bytes == 0)
      return;
    const auto staging = endpoint.device().allocate_host(bytes);
    endpoint.stream().copy(staging.get(), source, bytes);
    endpoint.synchronize();
    std::memcpy(values.data(), staging.get(), static_cast<size_t>(bytes));
  };
  endpoint.device().activate();
  download(made.slots, plan.slots);
  download(made.topk_idx, plan.topk_idx);
  return made;
}

}  // namespace moe::runtime
