#pragma once

#include <cstdint>
#include <string>

#include "layout/row.h"
#include "ops/combine.h"

// What every rank works out alike from one combine's arguments, whoever moves the rows.

namespace moe::host {

/// Of one row, 0 when only weights are pulled.
int64_t combined_row_bytes(const CombineParams& params);

layout::OperationArguments combine_arguments(const CombineParams& params);

/// What is wrong where rows were sent to ranks that have failed since, "" for nothing.
std::string find_failed_sources(const PlanHeader& plan, const Group& group);

/// Weights that peers pull from this rank, all together.
int64_t num_row_weights(const PlanHeader& plan);

/// Sums and pulled weights share one window: [sums, to a multiple of 64][weights].
struct SumsWindow {
  int64_t weights_offset = 0;  ///< 0 where the sums go to the caller's `out`
  int64_t bytes = 0;
};

SumsWindow sums_window(const CombineParams& params);

/// Says where sums and pulled weights lie.
/// @param base  Of the memory that sums_window() lays out; null where it has no bytes.
void point_into_sums(const CombineParams& params, std::byte* base, CombineOutcome* outcome);

}  // namespace moe::host
