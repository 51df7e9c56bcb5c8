#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "host/dispatch.h"
#include "host/endpoint.h"
#include "host/exchange.h"
#include "host/plan.h"
#include "host/scale_stage.h"
#include "layout/window.h"

namespace moe::host {

/// The data phase of a dispatch on the sender: every token is read once and written, quantised if
/// asked, with what travels beside it, to its final places.
class RowWriter {
 public:
  RowWriter(Endpoint& endpoint,
            const DispatchParams& params,
            const Plan& plan,
            const std::vector<layout::ReceiveWindow>& windows,
            const std::vector<std::byte*>& bases,
            bool with_topk_idx,
            Exchange& exchange);

  /// Writes all rows of this rank. @param mode  how rows are stored.
  void write(StoreMode mode);

 private:
  /// Where the rows of one token go, and scratch for its scale factors.
  struct Scratch {
    std::vector<std::byte*> places;
    std::vector<std::byte> scales;
    std::optional<ScaleStage> stage;  ///< column-major scale factors of large calls
  };

  void write_tokens(int64_t begin, int64_t end, StoreMode mode);
  void write_row(int64_t token_idx, int num_places, StoreMode mode, Scratch* scratch) const;
  void gather_scales(int64_t token_idx, std::byte* scales) const;
  void write_scales(int64_t token_idx, const int64_t* slots, Scratch* scratch) const;
  void write_weights(int64_t token_idx, const int64_t* slots) const;
  void write_choices(int64_t token_idx, const int64_t* slots) const;

  std::byte* base_of(int64_t slot) const {
    return bases_[static_cast<size_t>(layout::Slot::rank_idx(slot))];
  }
  const layout::ReceiveWindow& window_of(int64_t slot) const {
    return windows_[static_cast<size_t>(layout::Slot::rank_idx(slot))];
  }

  Endpoint& endpoint_;
  const DispatchParams& params_;
  const Plan& plan_;
  const std::vector<layout::ReceiveWindow>& windows_;
  const std::vector<std::byte*>& bases_;
  bool with_topk_idx_;
  Exchange& exchange_;
};

}  // namespace moe::host
