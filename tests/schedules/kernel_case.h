#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "cpu/row_kernels.h"
#include "kernels/buffer.h"
#include "layout/capacity.h"
#include "layout/replicas.h"
#include "layout/routing.h"
#include "layout/window.h"
#include "schedules/random.h"
#include "schedules/spec.h"

namespace moe::simt::checker {

/// A small case of the kernels: shapes that all its operations have in common.
struct KernelCase {
  int num_ranks = 2;
  int num_devices = 1;           ///< that ranks take in turn
  int num_local_ranks = 0;       ///< of a node; 0 where all ranks share one
  int64_t tokens_per_chunk = 1;  ///< of rows between nodes
  int64_t num_reply_places = 1;  ///< of a combine between nodes: the least a rail region has
  bool node_reduction = false;   ///< a node sends one sum for a token of another
  bool rank_reduction = false;   ///< a rank adds a token's rows before another pulls their sum
  bool offers_rows = false;      ///< a row that is alone is pulled where it lies
  int num_experts = 4;
  int num_blocks = 2;
  int num_threads = 32;
  int num_parts = 1;  ///< warps that share a row of a dispatch
  int depth = 2;
  layout::RowLayout layout = layout::RowLayout::kExpertMajor;
  int64_t expert_alignment = 1;
  int num_topk = 2;
  int64_t num_max_tokens = 5;    ///< of a rank; every step draws how many
  int64_t num_spare_tokens = 0;  ///< of a rank, low-latency: places for more, which nobody fills
  DType dtype = DType::kBFloat16;
  int64_t hidden = 16;
  bool is_quantized = false;
  cpu::RowQuantization quantization;
  bool is_column_major = false;
  bool with_weights = false;
  bool is_plain = false;
  layout::CapacityRule rule;
  bool has_fixed_rows = false;  ///< a rank's result has a number of rows that is drawn
  bool is_at_limits = false;    ///< as many rows as the limits allow, or one (unit) more
  bool with_masks = false;      ///< low-latency: a rank is masked now and then
  bool has_bad_choice = false;  ///< of one rank in each step
  /// The logical expert in every slot, where counts choose replicas and `num_experts` are slots.
  std::vector<int32_t> slot_expert;
  int num_logical_experts = 0;

  int64_t source_row_bytes() const { return hidden * element_bytes(dtype); }
  int64_t row_bytes() const { return is_quantized ? hidden : source_row_bytes(); }
  int64_t num_scales() const { return is_quantized ? quantization.num_blocks() : 0; }
  int64_t scale_bytes() const {
    return !is_quantized ? 0 : quantization.scale_format == layout::ScaleFormat::kUe8m0 ? 1 : 4;
  }
  bool is_by_rank() const { return layout == layout::RowLayout::kRankMajor; }
  bool is_elsewhere(int rank_idx, int other_rank) const {
    return rank_idx % num_devices != other_rank % num_devices;
  }
  bool has_replicas() const { return !slot_expert.empty(); }
  int num_ids() const { return has_replicas() ? num_logical_experts : num_experts; }
  bool has_origins() const { return !is_by_rank() && num_devices > 1 && num_ranks > 1; }
  bool adds_by_rank() const { return rank_reduction && !is_by_rank(); }
  /// The row that brings slot @p i of a token of @p rank_idx its bytes.
  int64_t origin_of(int rank_idx, const int64_t* slots, int64_t i) const;
  layout::Arrangement arrangement() const;
  layout::Replicas replicas(const layout::Placement& placement) const;
};

/// To the format of that name, with its default scale factors.
cpu::RowQuantization quantization_named(std::string_view name, DType dtype, int64_t hidden);

/// Inputs of one rank to a step.
struct RankInputs : AskedOfRank {
  std::vector<int64_t> passed_idx;  ///< the ids of its choices, which are slots but for replicas
  std::vector<std::byte> x;         ///< [num_tokens, source_row_bytes]
  std::vector<float> weights;       ///< [num_tokens, num_topk]
};

/// Bytes of which some have no value that anybody may rely on.
struct ExpectedBytes {
  std::vector<std::byte> bytes;
  std::vector<uint8_t> is_defined;

  explicit ExpectedBytes(int64_t num_bytes = 0)
      : bytes(static_cast<size_t>(num_bytes)), is_defined(static_cast<size_t>(num_bytes)) {}
  void set(int64_t offset, const void* from, int64_t num_bytes);
  void fill(int64_t offset, int value, int64_t num_bytes);
};

/// Results of one rank of a dispatch.
struct ExpectedDispatch {
  layout::ReceiveWindow window;
  layout::ReceivedRows received;
  ExpectedBytes bytes;          ///< of the window
  std::vector<int64_t> slots;   ///< of its tokens
  int64_t num_slots = 0;        ///< per token
  int64_t num_filled_rows = 0;  ///< that some rank sends
};

/// One step of all ranks: what they put in, and what plain C++ makes of it.
struct Step {
  std::vector<RankInputs> inputs;
  kernels::OperationStatus status = kernels::OperationStatus::kOk;
  std::shared_ptr<const DispatchSpec> spec;
  std::string difference_of_layout;  ///< see DispatchSpec
  layout::CountMatrix kept;
  int64_t num_recv_topk = 0;
  std::vector<ExpectedDispatch> dispatched;  ///< by rank
};

/// Draws which rank owns which expert; some may own none.
layout::Placement draw_placement(const KernelCase& shape, Random* random);
Step draw_step(const KernelCase& shape, const layout::Placement& placement, Random* random);

/// Other rows and weights with the routing of @p step, for a cached dispatch.
Step draw_cached_step(const KernelCase& shape,
                      const layout::Placement& placement,
                      const Step& step,
                      Random* random);

/// Rows of numbers whose sums depend on their order.
std::vector<std::byte> draw_rows(DType dtype, int64_t num_elements, Random* random);

/// Sums that combine makes of @p outputs ([num_rows, hidden] by rank) on @p rank_idx. With a
/// reduction rows are float32, bfloat16 or float16.
/// @param is_weighted  the weights of the step are applied
ExpectedBytes expected_sums(const KernelCase& shape,
                            const Step& step,
                            const std::vector<std::vector<std::byte>>& outputs,
                            int rank_idx,
                            bool is_weighted);

/// Weights that combine pulls on @p rank_idx. @param row_weights  [num_rows] or [num_rows,
///   num_recv_topk] by rank
ExpectedBytes expected_pulled(const KernelCase& shape,
                              const layout::Placement& placement,
                              const Step& step,
                              const std::vector<std::vector<float>>& row_weights,
                              int rank_idx);

}  // namespace moe::simt::checker
