#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/dtype.h"
#include "ops/dispatch.h"
#include "ops/endpoint.h"
#include "ops/plan.h"

namespace moe::ops {

/// The options of a combine: a CombineOptions of moe_comm/ep/call_options.py.
struct CombineOptions {
  CopyOut copy_out = CopyOut::kAuto;
  bool is_async = false;  ///< as in DispatchOptions
  /// As in DispatchOptions; the word on gradients is without bytes of weights.
  layout::OperationArguments arguments;
};

struct CombineParams : CombineOptions {
  const std::byte* x = nullptr;    ///< [M, row_bytes]; null to pull weights only
  bool has_rows = false;           ///< whether rows move; x may be null when M is 0
  DType dtype = DType::kBFloat16;  ///< type of x
  int64_t hidden = 0;
  const std::byte* weights = nullptr;  ///< [num_tokens, num_topk], applied while adding, or null
  int32_t weight_bytes = 0;            ///< bytes of a weight in `weights`: 4, 8, or 0
  const std::byte* row_weights = nullptr;   ///< [M] or [M, num_recv_topk], pulled
  int32_t row_weight_bytes = 0;             ///< 4, 8, or 0 when none are pulled
  std::byte* out = nullptr;                 ///< [num_tokens, row_bytes], or null
  std::shared_ptr<const PlanHeader> plan;   ///< plan of the endpoint's own kind
  std::shared_ptr<const void> caller_mark;  ///< as in DispatchParams
};

/// Result of a combine; `owner` keeps the memory, except that of a caller's `out`.
struct CombineOutcome {
  std::shared_ptr<void> owner;
  std::byte* sums = nullptr;       ///< [num_tokens, row_bytes], null when only weights were pulled
  std::byte* weights = nullptr;    ///< [num_tokens, num_topk], null when none were pulled
  int32_t gradients = 0;           ///< as in DispatchOutcome
  std::vector<int64_t> waited_ns;  ///< [num_ranks]
  std::shared_ptr<DeferredJoin> verdict;  ///< as in DispatchOutcome
  std::shared_ptr<DeferredJoin> end;      ///< as in DispatchOutcome
};

/// Pulls and adds, for every token of this rank, the rows its experts made.
///
/// Called by: one thread per rank, on every rank of the group, in the same order.
/// Synchronizes: returns when this rank's sums are complete and no peer reads @p params.x any more.
/// @throws as dispatch()
CombineOutcome combine(Endpoint& endpoint,
                       const CombineParams& params,
                       const group::InterruptCheck& interrupt_check);

}  // namespace moe::ops
