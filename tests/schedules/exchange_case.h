#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/exchange.h"
#include "layout/capacity.h"
#include "layout/routing.h"
#include "schedules/random.h"
#include "schedules/spec.h"

namespace moe::simt::checker {

/// Inputs of one rank to an operation.
struct RankInput : AskedOfRank {
  layout::OperationArguments arguments;
  layout::RowStatus status = layout::RowStatus::kOk;  ///< of a row that its host rejects
  std::string message;
  uint64_t offered_bytes = 0;
  uint64_t second_bytes = 0;  ///< what it can get when that was too little
  int tokens_per_chunk = 1;
};

/// One operation of all ranks, and what the spec says comes of it.
struct ExchangeCase {
  layout::Operation operation = layout::Operation::kDispatch;
  layout::Arrangement arrangement;
  layout::CapacityRule rule;
  bool is_column_major = false;
  bool with_topk_idx = false;
  bool has_host_read = false;  ///< the host learns of rows and may offer again
  std::vector<RankInput> ranks;

  kernels::OperationStatus first_status = kernels::OperationStatus::kOk;  ///< of the exchange
  kernels::OperationStatus last_status = kernels::OperationStatus::kOk;   ///< after second offers
  layout::CountMatrix asked;
  std::shared_ptr<const DispatchSpec> spec;    ///< where neither rejected nor too much
  std::string difference_of_layout;            ///< see DispatchSpec
  layout::CountMatrix kept;                    ///< when neither rejected nor too much
  std::vector<layout::ReceiveWindow> windows;  ///< [num_ranks]
  std::vector<uint8_t> is_short;               ///< [num_ranks]
  std::vector<int64_t> bad_value;  ///< [num_ranks] of a row that the device rejects, -1 for none
  std::vector<layout::RowStatus> row_status;  ///< [num_ranks]

  bool is_dispatch() const { return operation != layout::Operation::kCombine; }
  bool is_counted() const { return operation == layout::Operation::kDispatch; }
};

/// A case drawn from @p random: ragged and empty ranks, ids that are none or no expert's, choices
/// that go to one expert, limits of every kind, masks, and rows that are rejected.
/// @param is_active  [num_ranks]
ExchangeCase draw_exchange_case(Random& random,
                                const layout::Placement& placement,
                                const std::vector<uint8_t>& is_active);

}  // namespace moe::simt::checker
