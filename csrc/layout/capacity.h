#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "layout/routing.h"

namespace moe::layout {

/// Limits on the rows of a dispatch besides the fixed rows in the count matrix.
struct CapacityRule {
  int64_t expert_capacity = -1;  ///< most rows of one expert, over all ranks; -1 for no limit
  OnOverflow on_overflow = OnOverflow::kGrow;
};

/// A limit that more rows were asked for than it allows.
struct Overflow {
  int rank_idx = 0;
  int expert_idx = -1;  ///< global id where one expert has too many, else -1
  int64_t needed_rows = 0;
  int64_t available_rows = 0;
};

/// Every limit that is exceeded: experts ascending, then ranks ascending. For low-latency the
/// limit is the rows that every expert owns.
std::vector<Overflow> find_overflows(const CountMatrix& asked,
                                     const Placement& placement,
                                     const Arrangement& arrangement,
                                     const CapacityRule& rule);

/// Error that every rank throws where more rows were asked for than a limit allows, else null:
/// CapacityError under kRaise, InvalidArgument for low-latency.
/// @param row_bytes  Bytes of a row on arrival.
std::exception_ptr find_overflow(const CountMatrix& asked,
                                 const Placement& placement,
                                 const Arrangement& arrangement,
                                 const CapacityRule& rule,
                                 int64_t row_bytes);

/// The count matrix of what is delivered, equal on every rank.
///
/// Ranks that any rank masks send and receive nothing. kDrop: an expert keeps its first
/// `expert_capacity` rows in (source rank, token, k) order; then a rank keeps the rows whose padded
/// place lies within its fixed rows. kGrow: fixed rows grow to what is needed.
///
/// Example: kDrop, alignment 2, rank 0 has experts 0 and 1 and 4 fixed rows; ranks 0 and 1 ask for
/// [2, 1] and [1, 2] rows. Expert 0 keeps [2, 1] (rows 0 to 2), expert 1 begins at row 4 and keeps
/// nothing.
CountMatrix keep_rows(CountMatrix asked,
                      const Placement& placement,
                      const Arrangement& arrangement,
                      const CapacityRule& rule);

}  // namespace moe::layout
