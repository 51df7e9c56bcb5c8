#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/scale_stage.h"
#include "layout/window.h"
#include "ops/dispatch.h"
#include "ops/endpoint.h"
#include "ops/exchange.h"
#include "ops/plan.h"

namespace moe::ops {

/// Destinations of the rows of tokens, and what of their choices travels with them.
struct SlotTable {
  const int64_t* slots = nullptr;     ///< [num_tokens, num_slots], see layout::assign_slots
  const int64_t* topk_idx = nullptr;  ///< [num_tokens, num_topk]; null where neither ids travel nor
                                      ///< scale factors are collected by expert
  int64_t num_slots = 0;
  int64_t num_topk = 0;
  int64_t num_recv_topk = 0;
  bool is_by_rank = false;

  static SlotTable of(const Plan& plan) {
    return {plan.slots.data(),
            plan.topk_idx.data(),
            plan.num_slots,
            plan.num_topk,
            plan.num_recv_topk,
            plan.arrangement.is_by_rank()};
  }
};

/// Windows that rows arrive in, [num_ranks] each, and whether expert ids travel with them.
struct RowTargets {
  const std::vector<layout::ReceiveWindow>& windows;
  /// Addresses of the windows; null where this rank writes no row.
  const std::vector<std::byte*>& bases;
  bool with_topk_idx;
};

/// The data phase of a dispatch on the sender: every token is read once and written, quantized if
/// asked, with what travels beside it, to its final places.
class RowWriter {
 public:
  RowWriter(Endpoint& endpoint,
            const DispatchParams& params,
            const SlotTable& table,
            const RowTargets& targets,
            Exchange& exchange);

  /// Writes the rows of tokens [begin, end). @param mode  how rows are stored.
  void write(int64_t begin, int64_t end, cpu::StoreMode mode);

  /// Writes one row, quantized if asked, and its scale factors, side by side, to a message.
  void write_to_message(int64_t token_idx, std::byte* row, std::byte* scales) const;

 private:
  /// Destinations of the rows of one token, and scratch for its scale factors.
  struct Scratch {
    std::vector<std::byte*> places;
    std::vector<std::byte> scales;
    std::optional<cpu::ScaleRowStage> scale_rows;  ///< scale factors of large calls
    /// Scale factors of large calls, if column-major.
    std::optional<cpu::ScaleColumnStage> scale_columns;
  };

  void write_tokens(int64_t begin, int64_t end, bool is_first, cpu::StoreMode mode);
  void write_row(int64_t token_idx,
                 std::byte* const* places,
                 int num_places,
                 std::byte* scales,
                 cpu::StoreMode mode) const;
  void gather_scales(int64_t token_idx, std::byte* scales) const;
  void write_scales(int64_t token_idx, const int64_t* slots, Scratch* scratch) const;
  /// Stream of rows that follow one another: an expert's, or rank-major, a rank's.
  int64_t scale_stream_idx(int64_t token_idx, const int64_t* slots, int64_t i) const {
    return table_.is_by_rank ? layout::Slot::rank_idx(slots[i])
                             : table_.topk_idx[token_idx * table_.num_topk + i];
  }
  void write_weights(int64_t token_idx, const int64_t* slots) const;
  void write_choices(int64_t token_idx, const int64_t* slots) const;

  std::byte* base_of(int64_t slot) const {
    return targets_.bases[static_cast<size_t>(layout::Slot::rank_idx(slot))];
  }
  const layout::ReceiveWindow& window_of(int64_t slot) const {
    return targets_.windows[static_cast<size_t>(layout::Slot::rank_idx(slot))];
  }

  Endpoint& endpoint_;
  const DispatchParams& params_;
  SlotTable table_;
  RowTargets targets_;
  Exchange& exchange_;
};

}  // namespace moe::ops
