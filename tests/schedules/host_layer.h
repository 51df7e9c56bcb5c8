#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/combine.h"
#include "ops/dispatch.h"
#include "schedules/host_world.h"
#include "schedules/spec.h"

namespace moe::simt::checker {

/// One MoE layer of a HostWorld. Tokens and routing of every rank follow from the seed and the
/// number of the step alone, so that every rank knows what it must receive. Experts pass on what
/// they get.
class HostLayer {
 public:
  struct Shape {
    int num_experts = 4;
    int64_t num_topk = 2;
    int64_t most_tokens = 3;
    int64_t hidden = 8;  ///< float32
    int64_t alignment = 1;
    layout::RowLayout layout = layout::RowLayout::kExpertMajor;
    bool with_weights = false;
    bool with_factors = false;  ///< combine applies weights whose sums depend on the order
    bool is_in_place = true;    ///< experts write into the heap
    int64_t num_scales = 0;     ///< scale factors that come with a row
    int32_t scale_bytes = 4;    ///< of one
    bool has_scale_columns = false;
    bool is_read_elsewhere = false;  ///< results are handed to another thread of the rank
    ops::CopyOut copy_out = ops::CopyOut::kNever;
  };

  HostLayer(HostRank& rank, std::shared_ptr<ops::Endpoint> endpoint, const Shape& shape)
      : rank_(rank), endpoint_(std::move(endpoint)), shape_(shape) {}

  /// Ranks that have failed send nothing and get nothing.
  void exclude(int rank_idx) { excluded_ |= uint64_t{1} << rank_idx; }
  /// Runs now and then while this rank waits.
  void set_interrupt_check(group::InterruptCheck check) { interrupt_check_ = std::move(check); }

  /// Dispatch, experts, combine; overwrites the experts' rows as soon as combine has returned.
  void run(int64_t step);
  /// The same with a second dispatch by the handle, of other rows.
  void run_twice(int64_t step);
  /// Dispatch alone: rows with their scale factors.
  void run_dispatch(int64_t step);
  /// One dispatch and then combines by its handle until one of them throws.
  void run_combines(int64_t step);
  /// A dispatch in which @p bad_rank names an expert that does not exist.
  void run_rejected(int64_t step, int bad_rank);

  /// Operations that have ended well here: the last epoch that did, where this is all that runs on
  /// the buffer.
  int64_t num_completed() const { return num_completed_; }

 private:
  struct Tokens {
    int64_t num_tokens = 0;
    std::vector<float> x;
    std::vector<int64_t> topk_idx;
    std::vector<float> weights;
    std::vector<std::byte> scales;  ///< [num_tokens, num_scales, scale_bytes]
  };

  /// @param values  Of the rows; another number gives other rows for the same routing.
  Tokens tokens_of(int rank_idx, int64_t step, int64_t values) const;
  DispatchSpec spec_of(int64_t step) const;
  void choose_slots(const layout::Replicas& replicas, std::vector<AskedOfRank>* asked) const;
  ops::DispatchOutcome dispatch(const Tokens& tokens,
                                const std::shared_ptr<const ops::PlanHeader>& plan);
  void check_rows(const ops::DispatchOutcome& outcome, int64_t step, int64_t values) const;
  void check_row(const ops::DispatchOutcome& outcome,
                 int64_t row_idx,
                 const float* expected,
                 const char* what) const;
  void check_scales(const ops::DispatchOutcome& outcome,
                    int64_t row_idx,
                    const std::byte* expected) const;
  void combine(const ops::DispatchOutcome& outcome, int64_t step, const Tokens& tokens);
  /// The sum of @p terms, by the rules of the reduction that EndpointConfig has on, if any.
  float sum_of(const Tokens& tokens, int64_t token_idx, const std::vector<Term>& terms) const;
  int rank_of(int64_t expert_idx) const {
    return endpoint_->placement().expert_rank[static_cast<size_t>(expert_idx)];
  }
  void read_elsewhere(const std::byte* begin, int64_t bytes) const;
  int64_t row_bytes() const { return shape_.hidden * 4; }
  int64_t scale_row_bytes() const { return shape_.num_scales * shape_.scale_bytes; }

  HostRank& rank_;
  std::shared_ptr<ops::Endpoint> endpoint_;
  Shape shape_;
  uint64_t excluded_ = 0;
  group::InterruptCheck interrupt_check_;
  int64_t num_completed_ = 0;
};

}  // namespace moe::simt::checker
