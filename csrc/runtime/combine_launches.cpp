#include "runtime/combine_launches.h"

#include <algorithm>

#include "kernels/rank_sums.h"
#include "ops/combine_rules.h"

namespace moe::runtime {

namespace {

kernels::CombineParams kernel_params(DeviceEndpoint& endpoint, const ops::CombineParams& params) {
  const auto& plan = static_cast<const DevicePlan&>(*params.plan);
  kernels::CombineParams kernel;
  kernel.buffer = endpoint.control().buffer();
  kernel.dtype = params.has_rows ? params.dtype : DType::kBytes;
  kernel.hidden = params.has_rows ? params.hidden : 0;
  kernel.num_tokens = plan.num_tokens;
  kernel.num_topk = static_cast<int32_t>(plan.num_topk);
  kernel.num_slots = static_cast<int32_t>(plan.num_slots);
  // Else each place has one.
  if (plan.arrangement.is_by_rank() || endpoint.launcher().internode() != nullptr)
    kernel.num_recv_topk = static_cast<int32_t>(plan.num_recv_topk);
  kernel.arrangement = plan.arrangement;
  kernel.slots = plan.slots;
  kernel.topk_idx = plan.topk_idx;
  kernel.weights = params.weights;
  kernel.weight_bytes = params.weight_bytes;
  kernel.pulled_bytes = params.row_weight_bytes;
  kernel.is_plain = endpoint.device().has_bulk_copies() ? 0 : 1;
  const Internode* const internode = endpoint.launcher().internode();
  kernel.node_reduction = internode != nullptr && internode->node_reduction() ? 1 : 0;
  return kernel;
}

/// Bytes of a number of the type that rows are added in.
int32_t added_bytes(const ops::CombineParams& params) {
  return params.dtype == DType::kFloat64 ? 8 : 4;
}

layout::RankSumsMap rank_sums_map(const ops::CombineParams& params) {
  return layout::RankSumsMap::make(
      params.plan->num_tokens, params.plan->num_slots, added_bytes(params));
}

/// Offer of this rank's rows that are pulled alone: 0 bytes where they do not lie in its
/// heap, in units of bulk copies.
Offer find_own_rows(const DeviceEndpoint& endpoint, const ops::CombineParams& params) {
  Offer offer;
  const auto bytes =
      static_cast<uint64_t>(params.plan->num_rows() * ops::combined_row_bytes(params));
  const bool is_found = bytes > 0 && reinterpret_cast<uintptr_t>(params.x) % 16 == 0 &&
                        endpoint.memory().find(params.x, bytes, &offer);
  return is_found ? offer : Offer{};
}

/// Adds the rows that lie here, and has the combine pull the sums of the others.
/// @param kernel  parameters of the combine
void launch_rank_sums(DeviceEndpoint& endpoint,
                      const ops::CombineParams& params,
                      std::byte* requests,
                      kernels::CombineParams* kernel) {
  kernels::RankSumsParams sums;
  sums.buffer = kernel->buffer;
  sums.tables = kernel->tables;
  sums.dtype = params.dtype;
  sums.hidden = params.hidden;
  sums.rows = params.x;
  sums.sums = requests + rank_sums_map(params).sums_offset;
  // Rows and sums are this rank's own, and no block but the last waits: all SMs, for a short time,
  // have as many loads under way as memory needs.
  device::Launch launch =
      endpoint.launcher().launch_behind(endpoint.device().num_sms(), kernels::kMaxCombineThreads);
  launch.num_threads = std::min(launch.num_threads, kernels::kMaxCombineThreads);
  kernels::launch_rank_sums(launch, sums);
  kernel->row_slots = reinterpret_cast<const int64_t*>(requests);
  kernel->weights = nullptr;
  kernel->weight_bytes = 0;
}

}  // namespace

int64_t rank_sums_bytes(const ops::CombineParams& params) {
  return rank_sums_map(params).bytes(params.plan->num_rows(), ops::combined_row_bytes(params));
}

Offer launch_requests(DeviceEndpoint& endpoint,
                      const ops::CombineParams& params,
                      const Window& window) {
  const auto& plan = static_cast<const DevicePlan&>(*params.plan);
  kernels::RankRequestsParams requests;
  requests.num_ranks = endpoint.num_ranks();
  requests.num_tokens = plan.num_tokens;
  requests.num_slots = static_cast<int32_t>(plan.num_slots);
  requests.slots = plan.slots;
  requests.weights = params.weights;
  requests.weight_bytes = params.weight_bytes;
  requests.number_bytes = added_bytes(params);
  requests.rows = find_own_rows(endpoint, params);
  requests.window = window.data();
  const Launcher& launcher = endpoint.launcher();
  kernels::launch_rank_requests(launcher.launch(launcher.num_sms()), requests);
  const auto sums_offset = static_cast<uint64_t>(rank_sums_map(params).sums_offset);
  Offer sums = window.offer();
  sums.offset += sums_offset;
  sums.bytes -= sums_offset;
  return sums;
}

std::string find_shortage(DeviceEndpoint& endpoint, const ops::CombineParams& params) {
  const Internode* const internode = endpoint.launcher().internode();
  if (internode == nullptr)
    return "";
  return internode->find_shortage(
      internode->kernels().combine_bytes(kernel_params(endpoint, params), internode->rails()),
      params.plan->num_tokens,
      ops::combined_row_bytes(params));
}

kernels::ExchangeParams combine_row(const DeviceEndpoint& endpoint,
                                    const ops::CombineParams& params) {
  const auto& plan = static_cast<const DevicePlan&>(*params.plan);
  kernels::ExchangeParams row;
  row.tables = endpoint.control().tables();
  row.arguments = ops::combine_arguments(params);
  row.num_tokens = static_cast<int32_t>(plan.num_tokens);
  row.arrangement = plan.arrangement;
  row.kept_counts = plan.device_counts;
  row.adds_for_peers = ops::adds_by_rank(endpoint.config(), params) ? 1 : 0;
  return row;
}

void launch_sums(DeviceEndpoint& endpoint,
                 const ops::CombineParams& params,
                 const kernels::Tables& tables,
                 std::byte* requests,
                 std::byte* sums,
                 std::byte* pulled) {
  kernels::CombineParams kernel = kernel_params(endpoint, params);
  kernel.tables = tables;
  kernel.sums = sums;
  kernel.pulled = pulled;
  const Launcher& launcher = endpoint.launcher();
  if (const Internode* const internode = launcher.internode()) {
    const InternodeKernels& kernels = internode->kernels();
    device::Launch launch = launcher.launch(launcher.num_sms());
    fit_shared_memory(endpoint.device(), launch, [&](int num_threads) {
      return kernels.combine_shared_bytes(kernel, internode->rails(), num_threads);
    });
    kernels.combine(launch, kernel, internode->rails());
    return;
  }
  if (requests != nullptr)
    launch_rank_sums(endpoint, params, requests, &kernel);
  device::Launch launch = launcher.launch_behind(launcher.num_sms(), kernels::kMaxCombineThreads);
  launch.num_threads = std::min(launch.num_threads, kernels::kMaxCombineThreads);
  fit_shared_memory(endpoint.device(), launch, [&](int num_threads) {
    return kernels::combine_shared_bytes(kernel, num_threads);
  });
  kernels::launch_combine(launch, kernel);
}

}  // namespace moe::runtime
