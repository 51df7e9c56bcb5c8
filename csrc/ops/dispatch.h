#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "layout/capacity.h"
#include "layout/replicas.h"
#include "layout/window.h"
#include "ops/deferred_join.h"
#include "ops/endpoint.h"
#include "ops/plan.h"

namespace moe::ops {

/// Bytes that the fan-out kernel copies in. Rows are a multiple of it; those that come quantized
/// need not be.
inline constexpr int64_t kRowUnit = 16;

/// Rule for copying results out of the heap.
enum class CopyOut { kAuto, kAlways, kNever };

/// The options of a dispatch: a DispatchOptions of moe_comm/ep/call_options.py but for how rows are
/// quantized.
struct DispatchOptions {
  layout::RowLayout layout = layout::RowLayout::kExpertMajor;
  int64_t expert_alignment = 1;
  int64_t fixed_rows = -1;        ///< rows of this rank's result; -1 for as many as arrive
  std::vector<int> masked_ranks;  ///< low-latency
  CopyOut copy_out = CopyOut::kAuto;
  /// The caller asks for the end later, by DispatchOutcome::end where there is one: rows for this
  /// rank may be on their way when the call returns.
  bool is_async = false;
  layout::OperationArguments
      arguments;  ///< options that travel; dispatch_arguments() adds the rest

  layout::CapacityRule capacity() const {
    return {arguments.expert_capacity, static_cast<layout::OnOverflow>(arguments.on_overflow)};
  }
  bool has_capacity() const { return fixed_rows >= 0 || arguments.expert_capacity >= 0; }
};

struct DispatchParams : DispatchOptions {
  const std::byte* x = nullptr;        ///< [num_tokens, source_row_bytes]
  const int64_t* topk_idx = nullptr;   ///< [num_tokens, num_topk], uncached
  const std::byte* weights = nullptr;  ///< [num_tokens, num_topk] of weight_bytes, or null
  std::shared_ptr<const layout::Replicas> replicas;  ///< uncached; null where ids are slots
  int64_t num_tokens = 0;
  int64_t num_topk = 0;  ///< uncached
  int64_t source_row_bytes = 0;
  int64_t row_bytes = 0;     ///< on the wire
  int32_t weight_bytes = 0;  ///< 4, 8, or 0 without weights
  int32_t dtype = 0;         ///< `code << 8 | bits`, compared between ranks only

  layout::QuantizationCode quantization;  ///< 0 for rows without scale factors
  bool is_quantized_here = false;
  cpu::RowQuantization row_quantization;
  int64_t num_scales = 0;             ///< per row, as they travel
  int32_t scale_bytes = 0;            ///< bytes of a scale factor
  const std::byte* scales = nullptr;  ///< scale factors of rows that are quantized already
  int64_t scale_row_stride = 0;       ///< bytes from a row's scale factors to the next row's
  int64_t scale_step = 0;             ///< bytes from a scale factor to the next

  std::shared_ptr<Window> window;  ///< low-latency: to receive in; null where none was to be had
  std::shared_ptr<const PlanHeader> plan;  ///< cached dispatch: of the endpoint's own kind
  std::optional<bool> is_captured;         ///< EndpointBase::is_capturing(), where that was asked
  /// Result of EndpointBase::mark_caller() as an operation of a progress thread was issued.
  std::shared_ptr<const void> caller_mark;

  bool is_column_major() const { return quantization.is_column_major(); }
  /// Returns whether local expert ids travel with rows.
  bool with_topk_idx(const layout::Arrangement& arrangement) const {
    return plan == nullptr && arrangement.is_by_rank();
  }
};

/// Result of a dispatch; `owner` keeps the memory.
struct DispatchOutcome {
  std::shared_ptr<void> owner;
  std::byte* rows = nullptr;      ///< [M, row_bytes]
  std::byte* scales = nullptr;    ///< as scale_map says, null without scale factors
  std::byte* weights = nullptr;   ///< [M] or [M, num_recv_topk], null without weights
  std::byte* topk_idx = nullptr;  ///< int64 [M, num_recv_topk] where has_topk_idx
  bool has_topk_idx = false;      ///< rank-major and uncached
  /// int32 [num_local_experts + 1] in the memory of the rows; null where the plan's is to be
  /// copied.
  std::shared_ptr<void> expert_offsets;
  /// A dispatch that was captured: int64 [num_local_experts] and kernels::Tables::status [2], on
  /// the device; else null.
  std::shared_ptr<void> num_tokens_per_expert;
  std::shared_ptr<void> status;
  layout::ScaleMap scale_map;
  int32_t gradients = 0;                   ///< layout::GradientWord: what the ranks say, united
  std::vector<int64_t> waited_ns;          ///< [num_ranks]; DeferredJoin::waited_ns() comes on top
  std::shared_ptr<const PlanHeader> plan;  ///< plan of the endpoint's own kind
  /// Waits for the words of the ranks where the caller is a stream and the host has not heard them.
  /// Null where it has heard.
  std::shared_ptr<DeferredJoin> verdict;
  std::shared_ptr<DeferredJoin> end;  ///< or null; last, so that it goes first
};

/// Order of the rows of a call on @p endpoint.
layout::Arrangement arrangement_of(const EndpointBase& endpoint,
                                   layout::RowLayout layout,
                                   int64_t expert_alignment);

/// Rows of this rank's window in a low-latency dispatch.
int64_t num_low_latency_rows(const EndpointBase& endpoint);

/// The window of this rank in a low-latency dispatch, whose size no count decides.
layout::ReceiveWindow low_latency_window(const EndpointBase& endpoint,
                                         const DispatchParams& params);

/// Sends every row of @p params.x to the ranks of its experts, and receives this rank's.
///
/// Called by: one thread per rank, on every rank of the group, in the same order.
/// Synchronizes: returns when this rank's rows are sent and all rows for it have arrived.
/// @throws InvalidArgument  a row of some rank was rejected or rows disagree; on every rank alike.
/// @throws CapacityError    some rank's heap cannot hold what it would receive, or more was asked
///   for than a capacity that raises allows; nothing was sent.
/// @throws PeerFailed, PeerTimeout  the communicator is aborted.
DispatchOutcome dispatch(Endpoint& endpoint,
                         const DispatchParams& params,
                         const group::InterruptCheck& interrupt_check);

/// Returns whether @p mode wants a finished window of so many bytes copied out of the heap.
bool is_copied_out(EndpointBase& endpoint, uint64_t bytes, CopyOut mode);

/// Says where in the window that begins at @p outcome->rows lies what comes with rows.
void point_into_window(const DispatchParams& params,
                       const layout::Arrangement& arrangement,
                       const layout::ReceiveWindow& window,
                       DispatchOutcome* outcome);

/// Copies a finished window out of the heap when @p mode says so; @return the owner of the result.
std::shared_ptr<void> copy_out_window(Endpoint& endpoint,
                                      std::shared_ptr<Window> window,
                                      uint64_t bytes,
                                      CopyOut mode,
                                      std::byte** data);

}  // namespace moe::ops
