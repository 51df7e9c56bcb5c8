#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "group/group.h"
#include "layout/routing.h"
#include "layout/row.h"

// Judgment of ranks on each other's rows: the same on every rank, as all see the same rows.

namespace moe::ops {

/// Message of a rank in its row.
struct RowMessage {
  layout::OperationArguments arguments;
  int64_t num_tokens = 0;
  const int32_t* counts = nullptr;  ///< a row of the count matrix, uncached dispatch
  Offer offer;
  Offer weights_offer;              ///< offer of weights or of sets of tokens, see layout::Row
  const std::byte* sets = nullptr;  ///< sets that are offered there
  layout::RowStatus status = layout::RowStatus::kOk;
  std::string message;  ///< status not kOk: what is wrong, with both values
  uint64_t needed_bytes = 0;
  uint64_t available_bytes = 0;
};

/// Problem of a rank, if it has any.
struct RankProblem {
  layout::RowStatus status = layout::RowStatus::kOk;
  std::string text;
  uint64_t needed_bytes = 0;  ///< status kNoCapacity
  uint64_t available_bytes = 0;
};

/// Text for check_same_config() of what ranks must configure alike, by name.
std::string config_text(const std::vector<std::pair<std::string, std::string>>& config);

/// @param noun          Name of what is configured.
/// @param payloads      Text of every rank, [num_ranks]: config_text() behind @p header_bytes, ""
///   of ranks that are excluded.
/// @throws InvalidArgument  "ranks configure the buffer differently: hidden is 64 on rank 0 and 32
///   on rank 1".
void check_same_config(const char* noun,
                       const std::vector<std::string>& payloads,
                       size_t header_bytes);

/// A private copy of all rows of one epoch. Entries of excluded ranks are zero.
struct Rows {
  std::vector<layout::Row> headers;   ///< [num_ranks]
  std::vector<RankProblem> problems;  ///< [num_ranks]
  layout::CountMatrix counts;         ///< uncached dispatch
};

/// "dispatch(expert-major, ...)": the arguments as a reader would write them.
std::string describe(const layout::OperationArguments& arguments);

/// Union of the words of all ranks on gradients, see layout::GradientWord.
int32_t unite_gradients(const Rows& rows, const group::Group& group);

/// Error that every rank throws where some have a problem, else null. It names all that have.
/// @param problems  [num_ranks], none for ranks that are excluded.
std::exception_ptr join_problems(const std::vector<RankProblem>& problems);

/// "rank 1 offers choices that are not those it counts"
std::string describe_other_choices(int rank_idx);

/// Error that every rank throws where one found something wrong or rows disagree, else null.
std::exception_ptr find_disagreement(const Rows& rows, const group::Group& group);

}  // namespace moe::ops
