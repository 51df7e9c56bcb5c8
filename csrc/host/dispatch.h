#pragma once

#include <cstdint>
#include <memory>

#include "host/endpoint.h"
#include "host/plan.h"

namespace moe::host {

/// Whether results are copied out of the heap.
enum class CopyOut { kAuto, kAlways, kNever };

struct DispatchParams {
  const std::byte* x = nullptr;        ///< [num_tokens, row_bytes]
  const int64_t* topk_idx = nullptr;   ///< [num_tokens, num_topk], uncached
  const std::byte* weights = nullptr;  ///< [num_tokens, num_topk] of weight_bytes, or null
  int64_t num_tokens = 0;
  int64_t row_bytes = 0;
  int32_t weight_bytes = 0;  ///< 4, 8, or 0 without weights
  int32_t dtype = 0;         ///< `code << 8 | bits`, compared between ranks only
  layout::RowLayout layout = layout::RowLayout::kExpertMajor;
  int64_t expert_alignment = 1;
  std::shared_ptr<const Plan> plan;  ///< cached dispatch: where the rows go
  CopyOut copy_out = CopyOut::kAuto;
};

/// What arrived; `owner` keeps the memory.
struct DispatchOutcome {
  std::shared_ptr<void> owner;
  std::byte* rows = nullptr;      ///< [M, row_bytes]
  std::byte* weights = nullptr;   ///< [M] or [M, num_topk], null without weights
  std::byte* topk_idx = nullptr;  ///< int64 [M, num_topk] where has_topk_idx
  bool has_topk_idx = false;      ///< rank-major and uncached
  std::shared_ptr<const Plan> plan;
};

/// Sends every row of @p params.x to the ranks of its experts, and receives this rank's.
///
/// Called by: one thread per rank, on every rank of the group, in the same order.
/// Synchronizes: returns when this rank's rows are sent and all rows for it have arrived.
/// @throws InvalidArgument  a row of some rank was rejected or rows disagree; on every rank alike.
/// @throws CapacityError    some rank's heap cannot hold what it would receive; nothing was sent.
/// @throws PeerFailed, PeerTimeout  the communicator is aborted.
DispatchOutcome dispatch(Endpoint& endpoint,
                         const DispatchParams& params,
                         const InterruptCheck& interrupt_check);

/// Copies a finished window out of the heap when @p mode says so; @return what owns the result.
std::shared_ptr<void> copy_out_window(Endpoint& endpoint,
                                      std::shared_ptr<Window> window,
                                      uint64_t bytes,
                                      CopyOut mode,
                                      std::byte** data);

}  // namespace moe::host
