#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "host/endpoint.h"
#include "host/exchange.h"
#include "host/plan.h"
#include "host/relay.h"
#include "layout/internode_combine.h"

namespace moe::host {

/// Where the ranks of this node have what peers pull; by rank, null where nothing is pulled here.
struct PullBases {
  std::vector<std::byte*> rows;
  std::vector<std::byte*> weights;
};

/// What crosses nodes in one combine, for one rank.
///
/// As source it asks the rank of its rail on every other node for the rows of its tokens there, by
/// slot, in the order its tokens need them. As relay it gathers the rows that the ranks of its rail
/// ask for from the windows of the ranks of its own node. Rows travel as they are, in chunks, a
/// few of them on the way at a time; they are added by their source alone, so that sums have the
/// bits they have with one node.
///
/// Example: 2 nodes of 2 ranks; token 0 of rank 1 has rows on ranks 0, 2 and 3. Rank 1 asks rank 3
/// for two rows; rank 3 copies one from the window of rank 2 and one from its own into a chunk.
class InternodeCombine {
 public:
  /// @param bases  Of the ranks of this node; outlives this.
  InternodeCombine(Endpoint& endpoint,
                   const Plan& plan,
                   Exchange& exchange,
                   const layout::PulledRow& pulled,
                   const PullBases& bases);

  /// Whether anything is pulled from @p rank_idx, of this node, by this rank or on behalf of
  /// another node's.
  static bool is_pulled_here(const Plan& plan, const Group& group, int rank_idx);

  /// Calls @p add_tokens(begin, end) for all tokens, in ascending order, once row() and weights()
  /// have what they need, and serves the other nodes meanwhile. Returns when both are done; the
  /// ranks of this node have then been told that the ranks of the rail pull no more from them.
  void run(const std::function<void(int64_t, int64_t)>& add_tokens);

  // While add_tokens() runs, of its tokens' slots that lie on other nodes.
  const std::byte* row(int64_t token_idx, int64_t slot_pos) const {
    return find(token_idx, slot_pos).row;
  }
  /// Of the row: one weight, or as many as a token has choices (rank-major).
  const std::byte* weights(int64_t token_idx, int64_t slot_pos) const {
    return find(token_idx, slot_pos).weights;
  }

 private:
  struct Chunk {
    Rail::Buffer buffer;
    Relay::Transfer transfer;
  };
  /// Rows of this rank's tokens on another node.
  struct Wanted {
    layout::PullChunks chunks;
    int64_t num_asked_chunks = 0;   ///< whose transfers have been started
    int64_t num_here = 0;           ///< rows that have arrived
    int64_t num_passed = 0;         ///< rows of tokens that were handed on
    int64_t num_passed_chunks = 0;  ///< no longer kept
    std::deque<Chunk> kept;
  };
  /// Rows on this node that the rail's rank on another node wants.
  struct Supply {
    int node_idx = 0;
    int src_rank = 0;
    layout::PulledRow pulled;
    layout::PullChunks chunks;
    int64_t num_sent_chunks = 0;
    Chunk request;  ///< slots, int64 [num_rows]
    bool is_request_here = false;
    bool is_done = false;  ///< nothing is pulled any more
    std::deque<Relay::Transfer> on_the_way;
  };
  struct Place {
    const std::byte* row;
    const std::byte* weights;
  };

  layout::PullChunks chunks_between(const layout::PulledRow& pulled,
                                    int src_rank,
                                    int node_idx) const;
  void ask();
  std::vector<Rail::Buffer> list_slots();
  void ask_for_chunks(int node_idx);
  bool take_chunks();
  int64_t find_ready_end();
  void drop_passed_chunks();
  bool serve(Supply* supply);
  void check_request(const Supply& supply) const;
  void gather(const Supply& supply, std::byte* chunk);
  void end_supply(Supply* supply);
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
  std::vector<int64_t> request_idx_;  ///< of every slot on another node, its place in the request
  std::vector<Wanted> wanted_;        ///< by node
  std::vector<Supply> supplies_;      ///< other nodes that take part
  int64_t num_passed_tokens_ = 0;
};

}  // namespace moe::host
