#pragma once

#include <cstdint>
#include <string>

#include "core/symmetric_memory.h"
#include "layout/row.h"
#include "ops/combine.h"

// Rules that every rank works out alike from one combine's arguments, on every engine.

namespace moe::ops {

/// Bytes of one row, 0 when only weights are pulled.
int64_t combined_row_bytes(const CombineParams& params);

layout::OperationArguments combine_arguments(const CombineParams& params);

/// Text of what is wrong where rows were sent to ranks that have failed since, "" for nothing.
std::string find_failed_sources(const PlanHeader& plan, const group::Group& group);

/// Weights that peers pull from this rank, all together.
int64_t num_row_weights(const PlanHeader& plan);

/// Returns whether every rank adds the rows of a token that lie with it before their sum crosses,
/// as all find alike. By rank there is one row of a token on each.
bool adds_by_rank(const EndpointConfig& config, const CombineParams& params);

/// Says where peers pull rows and weights from: in place where they lie in this rank's heap
/// already, else copied there, once.
/// @param row_bytes  0 where peers pull no rows of these
/// @param copy  copy(source, bytes): copies rows or weights to a window, and offers that.
template <typename Copy>
void offer_rows(const CombineParams& params,
                int64_t row_bytes,
                const SymmetricMemory& memory,
                Copy&& copy,
                Offer* rows,
                Offer* weights) {
  const auto offer = [&](const std::byte* source, int64_t bytes, Offer* place) {
    if (bytes != 0 && !memory.find(source, static_cast<uint64_t>(bytes), place))
      *place = copy(source, bytes);
  };
  const PlanHeader& plan = *params.plan;
  offer(params.x, plan.num_rows() * row_bytes, rows);
  offer(params.row_weights, num_row_weights(plan) * params.row_weight_bytes, weights);
}

/// Sums and pulled weights share one window: [sums, to a multiple of 64][weights].
struct SumsWindow {
  int64_t weights_offset = 0;  ///< 0 where the sums go to the caller's `out`
  int64_t bytes = 0;
};

SumsWindow sums_window(const CombineParams& params);

/// Says where sums and pulled weights lie.
/// @param base  Address of the memory that sums_window() lays out; null where it has no bytes.
void point_into_sums(const CombineParams& params, std::byte* base, CombineOutcome* outcome);

}  // namespace moe::ops
