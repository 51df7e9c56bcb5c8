#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "layout/internode.h"
#include "ops/dispatch.h"
#include "ops/exchange.h"
#include "ops/plan.h"
#include "ops/relay.h"
#include "ops/row_writer.h"

namespace moe::ops {

/// The data phase of a dispatch on several nodes.
///
/// A token's row crosses once to every other node that has an expert of it, to the rank of this
/// rank's rail there, which writes it to its final places in the windows of that node's ranks.
/// Chunks of rows to and from all nodes are under way while this rank writes its rows for its own
/// node. Where one rank serves many nodes they take turns, a chunk each.
class InternodeDispatch {
 public:
  /// @param targets  All outlive this. Rows are written to windows of this node.
  InternodeDispatch(Endpoint& endpoint,
                    const DispatchParams& params,
                    const Plan& plan,
                    const RowTargets& targets,
                    Exchange& exchange);

  /// Returns when this rank's rows are on their way and all that it relays are written and
  /// released. Calls @p on_written once its own rows for its node are written.
  void run(cpu::StoreMode mode, const std::function<void()>& on_written);

 private:
  /// Rows of this rank for another node.
  struct Departure {
    int node_idx = 0;
    std::vector<int64_t> tokens;
    size_t next = 0;  ///< next of `tokens`
    std::deque<Relay::Transfer> in_flight;
  };
  /// Rows of a rank of another node for this one.
  struct Arrival {
    struct Chunk {
      layout::InternodeChunk layout;
      Rail::Buffer buffer;
      Relay::Transfer transfer;
    };
    int node_idx = 0;
    int src_rank = 0;
    int64_t num_topk = 0;
    layout::InternodeRow row;
    Rail::Buffer header_buffer;
    Relay::Transfer header;       ///< until it has moved
    int64_t num_left = 0;         ///< rows that have not been asked for
    std::deque<Chunk> in_flight;  ///< in order
  };

  layout::InternodeRow row_of(int src_rank) const;
  bool sends_to_node(int src_rank, int node_idx) const;
  void split_slots();
  void start();
  bool step_departure(Departure& departure);
  void pack(const Departure& departure,
            const layout::InternodeChunk& chunk,
            std::byte* message) const;
  void pack_choices(int64_t token_idx,
                    int64_t row_idx,
                    int node_idx,
                    const layout::InternodeChunk& chunk,
                    std::byte* message) const;
  bool step_arrival(Arrival& arrival, cpu::StoreMode mode);
  void take_header(Arrival& arrival);
  void ask_for_chunks(Arrival& arrival);
  void fan_out(const Arrival& arrival, const Arrival::Chunk& chunk, cpu::StoreMode mode);
  void check_choices(const Arrival& arrival, const SlotTable& table, int64_t num_rows) const;
  bool has_ended(const Arrival& arrival) const {
    return arrival.header == nullptr && arrival.num_left == 0 && arrival.in_flight.empty();
  }
  bool step_local(cpu::StoreMode mode, const std::function<void()>& on_written);
  void wait();

  Endpoint& endpoint_;
  const DispatchParams& params_;
  const Plan& plan_;
  RowTargets targets_;
  Exchange& exchange_;
  Relay& relay_;
  const NodeLayout& nodes_;
  int own_node_;
  layout::InternodeRow own_row_;
  int64_t rows_per_chunk_;
  std::vector<int64_t> num_window_rows_;  ///< [num_ranks]
  std::vector<int64_t> local_slots_;      ///< slots of the plan, without those of other nodes
  RowWriter local_writer_;
  int64_t next_local_ = 0;
  bool is_written_ = false;
  std::vector<Departure> departures_;
  std::vector<Arrival> arrivals_;
};

}  // namespace moe::ops
