#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/rail.h"
#include "layout/internode.h"
#include "layout/workspace.h"
#include "ops/endpoint.h"

namespace moe::ops {

class Exchange;

/// Part of an operation on several nodes beside the local one: this rank's messages to the ranks
/// of its rail, and what they say to all ranks of this node, which it writes there on their behalf.
///
/// So every rank finds rows, second offers and done flags of all ranks in its own workspace, and
/// reads them as if there were one node. Made for one operation; its one thread uses it.
class Relay {
 public:
  using Transfer = std::shared_ptr<Rail::Transfer>;

  Relay(Endpoint& endpoint, Exchange& exchange);

  /// The other nodes that take part, ascending.
  const std::vector<int>& nodes() const { return nodes_; }
  /// The rank of that node on this rank's rail.
  int rail_rank(int node_idx) const;

  /// Sends this rank's row, an image of Row::stride() bytes, and asks for those of the rail. Of one
  /// operation the first messages. A row that offers sets of tokens is followed by them; the ranks
  /// of a node find them on the one that relays the row, which offers them in its place.
  /// @param sets  Sets that the row offers, or null.
  void exchange_row(const std::byte* image, const std::byte* sets);
  /// Before that: checks sets that arrive against their row, before any rank of this node sees it.
  void check_sets_by(const layout::Replicas& replicas) { replicas_ = &replicas; }
  void send_second_offer(const layout::SecondOffer& second);
  /// Asks for the second offers of those of @p short_ranks that are on this rank's rail.
  void expect_second_offers(const std::vector<int>& short_ranks);
  /// Writes rows and second offers that have arrived to the ranks of this node. Does not wait.
  /// @throws PeerFailed  the rail has failed; names the rank and what the engine says.
  void pump();

  /// Memory for one message of so many bytes and its checksum, kept between operations; goes back
  /// when its last owner drops it, be that the rail.
  Rail::Buffer buffer(uint64_t bytes) {
    return endpoint_.rail_buffers().take(bytes + checksum_bytes_);
  }
  /// Starts to send the first @p bytes of @p buffer, which nobody writes before the transfer has
  /// ended. The operation does not end before that.
  Transfer send(int node_idx, Rail::Buffer buffer, uint64_t bytes);
  Transfer receive(int node_idx, Rail::Buffer buffer, uint64_t bytes);
  /// Returns whether it has ended; nobody reads what was received before this has said so.
  /// @throws PeerFailed  it has failed, or what came is not what was sent; names the rank and what
  ///   the engine says, or the message.
  bool has_moved(const Transfer& transfer, int node_idx);

  /// Waits, under the stall limit, until @p is_ready(), which looks at transfers to or from
  /// @p node_idx (and maybe others): that node's rank is who is waited for.
  void wait(int node_idx, const std::function<bool()>& is_ready);

  /// Tells the ranks of this node that @p src_rank, of this rank's rail, has written (dispatch) or
  /// pulled (combine) all its rows here. Follows a store fence of every thread that wrote them.
  void release_done(int src_rank);

  /// Waits until everything this rank has sent is on its way.
  void finish_sends();

  /// The operation has failed: nothing moves over the rail any more.
  void give_up(const std::string& reason) { rail_.give_up(reason); }

 private:
  struct Incoming {
    int node_idx;
    Transfer transfer;
    Rail::Buffer buffer;
    bool is_row;        ///< else a second offer
    Rail::Buffer sets;  ///< sets of the row in `buffer`, which move then; or null
  };
  struct Outgoing {
    int node_idx;
    Transfer transfer;
  };
  /// A message that is received, until its checksum has been looked at.
  struct Unchecked {
    Transfer transfer;
    Rail::Buffer buffer;
    uint64_t bytes;
    uint32_t message_idx;
  };
  void relay(Incoming incoming);
  void relay_sets(Incoming incoming);
  void check_sets(int src_rank, const Incoming& incoming) const;
  /// A row of the count matrix.
  std::vector<int32_t> counts_of(const std::byte* image) const;
  void check_row(int src_rank, const std::byte* image) const;
  void send_to_all(const std::byte* message, uint64_t bytes);
  uint32_t checksum(int src_rank,
                    uint32_t message_idx,
                    const std::byte* message,
                    uint64_t bytes) const;
  void check(const Transfer& transfer, int node_idx);

  Endpoint& endpoint_;
  Exchange& exchange_;
  group::Group& group_;
  Rail& rail_;
  std::vector<int> nodes_;
  std::vector<Incoming> incoming_;
  std::vector<Outgoing> outgoing_;
  const uint64_t checksum_bytes_;  ///< behind every message; 0 where none is checked
  // By node, where messages are checked.
  std::vector<uint32_t> num_sent_;
  std::vector<uint32_t> num_received_;
  std::vector<Unchecked> unchecked_;
  const layout::Replicas* replicas_ = nullptr;
};

}  // namespace moe::ops
