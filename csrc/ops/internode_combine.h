#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "core/dtype.h"
#include "layout/internode_combine.h"
#include "ops/endpoint.h"
#include "ops/exchange.h"
#include "ops/plan.h"
#include "ops/relay.h"

namespace moe::ops {

/// Addresses of what peers pull, on ranks of this node; by rank, null where nothing is pulled here.
struct PullBases {
  std::vector<std::byte*> rows;
  std::vector<std::byte*> weights;
};

/// Places and order of additions with EpConfig.node_reduction.
struct Addition {
  DType dtype = DType::kBFloat16;
  int64_t hidden = 0;
  /// [num_tokens, num_topk], of the type rows are added in; null where none are applied.
  const std::byte* weights = nullptr;
  /// Bytes of the weight that travels with a request: 0 for rank-major, where none can be.
  int64_t weight_bytes = 0;
};

/// Part of one combine that crosses nodes, for one rank.
///
/// As source it asks the rank of its rail on every other node for the rows of its tokens there, by
/// slot, in the order its tokens need them. As relay it gathers the rows that the ranks of its rail
/// ask for from the windows of the ranks of its own node. Rows travel as they are, in chunks, a
/// few of them on the way at a time; they are added by their source alone, so that sums have the
/// bits they have with one node. With an Addition the relay adds the rows of every token, rounds
/// the sum to their type, and that is what travels.
///
/// Example: 2 nodes of 2 ranks; token 0 of rank 1 has rows on ranks 0, 2 and 3. Rank 1 asks rank 3
/// for two rows; rank 3 copies one from the window of rank 2 and one from its own into a chunk, or
/// adds them into a row of the chunk.
class InternodeCombine {
 public:
  /// @param bases     Addresses on the ranks of this node; outlives this.
  /// @param addition  Sums to make with EpConfig.node_reduction, if rows are pulled.
  InternodeCombine(Endpoint& endpoint,
                   const Plan& plan,
                   Exchange& exchange,
                   const layout::PulledRow& pulled,
                   const PullBases& bases,
                   const std::optional<Addition>& addition);

  /// Returns whether anything is pulled from @p rank_idx, of this node, by this rank or on behalf
  /// of another node's.
  static bool is_pulled_here(const Plan& plan, const group::Group& group, int rank_idx);

  /// Calls @p add_tokens(begin, end) for all tokens, in ascending order, once row() and weights()
  /// have what they need, and serves the other nodes meanwhile. Returns when both are done; the
  /// ranks of this node have then been told that the ranks of the rail pull no more from them.
  void run(const std::function<void(int64_t, int64_t)>& add_tokens);

  // While add_tokens() runs, of its tokens' slots that lie on other nodes.
  /// With an Addition: the sum of the token's rows on the node of that slot.
  const std::byte* row(int64_t token_idx, int64_t slot_pos) const {
    return find(token_idx, slot_pos).row;
  }
  /// Weights of the row: one, or as many as a token has choices (rank-major).
  const std::byte* weights(int64_t token_idx, int64_t slot_pos) const {
    return find(token_idx, slot_pos).weights;
  }

 private:
  struct Chunk {
    Rail::Buffer buffer;
    Relay::Transfer transfer;
  };
  /// Place of a slot on another node in the request to it, and in what comes back.
  struct Requested {
    int64_t request_idx = 0;
    int64_t row_idx = 0;  ///< request_idx, or the row of the token's sum
  };
  /// Rows of this rank's tokens on another node.
  struct NodeRequest {
    int64_t num_requested = 0;
    layout::PullChunks chunks;
    /// First request of every sum, then the end; empty without an Addition.
    std::vector<int64_t> first_request;
    int64_t num_asked_chunks = 0;   ///< chunks whose transfers have been started
    int64_t num_here = 0;           ///< rows that have arrived
    int64_t num_passed = 0;         ///< rows of tokens that were handed on
    int64_t num_passed_chunks = 0;  ///< no longer kept
    std::deque<Chunk> kept;
  };
  /// Rows on this node that the rail's rank on another node wants.
  struct PendingRows {
    int node_idx = 0;
    int src_rank = 0;
    layout::PulledRow pulled;
    int64_t num_requested = 0;
    layout::PullChunks chunks;           ///< with an Addition known once the request is here
    std::vector<int64_t> first_request;  ///< requests as in NodeRequest
    int64_t num_sent_chunks = 0;
    Chunk request;  ///< slots, int64 [num_requested]; with an Addition a SumRequest
    bool is_request_here = false;
    bool is_done = false;  ///< nothing is pulled any more
    std::deque<Relay::Transfer> on_the_way;
  };
  struct Place {
    const std::byte* row;
    const std::byte* weights;
  };

  int64_t num_requested(const layout::PulledRow& pulled, int src_rank, int node_idx) const;
  layout::PullChunks cut_rows(const layout::PulledRow& pulled, int64_t num_rows) const;
  layout::PullChunks cut_sums(const layout::PulledRow& pulled, int64_t num_sums) const;
  int64_t request_bytes(int64_t num_requested) const;
  void ask();
  std::vector<Rail::Buffer> list_slots();
  void list_weight(int64_t slot_idx, std::byte* weight) const;
  /// Offset in a request of the weight of its row @p request_idx.
  int64_t request_weight_at(int64_t num_requested, int64_t request_idx) const {
    const layout::SumRequest request{num_requested, addition_->weight_bytes};
    return request.weights_at() + request_idx * request.weight_bytes;
  }
  void ask_for_chunks(int node_idx);
  bool take_chunks();
  int64_t find_ready_end();
  void drop_passed_chunks();
  bool serve(PendingRows* pending);
  void check_request(const PendingRows& pending) const;
  void read_sum_request(PendingRows* pending) const;
  void gather(const PendingRows& pending, std::byte* chunk);
  void copy_rows(const PendingRows& pending, int64_t begin, int64_t end, std::byte* rows) const;
  void add_rows(const PendingRows& pending, int64_t begin, int64_t end, std::byte* sums) const;
  void copy_weights(const PendingRows& pending,
                    int64_t begin,
                    int64_t end,
                    std::byte* weights) const;
  const std::byte* row_at(int64_t slot, int64_t row_bytes) const {
    return offset_ptr(bases_.rows[static_cast<size_t>(layout::Slot::rank_idx(slot))],
                      layout::Slot::row_idx(slot),
                      row_bytes);
  }
  bool is_finished() const;
  void wait();
  Place find(int64_t token_idx, int64_t slot_pos) const;
  int node_of(int64_t slot) const { return nodes_.node_idx(layout::Slot::rank_idx(slot)); }

  Endpoint& endpoint_;
  const Plan& plan_;
  Exchange& exchange_;
  Relay& relay_;
  const NodeLayout& nodes_;
  const int own_node_;
  const layout::PulledRow pulled_;
  const PullBases& bases_;
  const std::optional<Addition> addition_;
  std::vector<Requested> requested_;  ///< request and row of every slot on another node
  std::vector<NodeRequest> wanted_;   ///< by node
  std::vector<PendingRows> pending_;  ///< other nodes that take part
  int64_t num_passed_tokens_ = 0;
};

}  // namespace moe::ops
