#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "group/peer_wait.h"
#include "layout/routing.h"
#include "layout/row.h"
#include "ops/agreement.h"
#include "ops/buffer_operation.h"
#include "ops/endpoint.h"
#include "ops/relay.h"

namespace moe::ops {

/// Number of tokens that a loop over rows handles between two looks at the exchange.
constexpr int64_t kTokensPerProgress = 64;

/// One operation of one buffer: its epoch, and the steps every operation is made of.
///
/// On several nodes flags are stored at the ranks of this node only: a Relay carries them to the
/// others, and stores theirs here.
///
/// Made by run_operation() only, which aborts the communicator when the operation ends by an
/// exception after it took its epoch and before every rank knows the same end.
class Exchange : public BufferOperation {
 public:
  Exchange(Endpoint& endpoint,
           layout::Operation operation,
           const group::InterruptCheck& interrupt_check);

  /// A window of this rank; peers that wait meanwhile allow for the time it takes to grow the heap.
  std::shared_ptr<Window> allocate(uint64_t bytes);

  /// This rank's messages to other nodes; null with one node.
  Relay* relay() { return relay_.get(); }

  /// Writes this rank's row to every active peer.
  void publish(const RowMessage& message);

  /// Waits for every active peer's row and copies them. Throws, on every rank alike, what some rank
  /// found wrong or where rows disagree; the epoch is then consumed and the buffer stays usable.
  Rows collect(bool with_counts);
  /// True where collect() may be put off until the operation has been handed out.
  static constexpr bool kMayDefer = false;

  /// See layout::count_tokens(): those of every rank, from the sets that it offered with its row.
  /// @param own_sets  Sets of this rank.
  void count_tokens(const std::vector<uint64_t>& own_sets,
                    const layout::Replicas& replicas,
                    Rows* rows);

  /// Publishes what a rank that was short could get, and waits for the same of @p short_ranks.
  /// On several nodes every rank calls expect_second_offers() first.
  void expect_second_offers(const std::vector<int>& short_ranks);
  void publish_second_offer(const Offer& offer, uint64_t needed_bytes, uint64_t available_bytes);
  layout::SecondOffer await_second_offer(int peer_rank);

  /// Every rank knows that this operation ends here: consumes the epoch without data.
  void settle();

  /// All of this rank's part has ended.
  void complete();

  /// Tells every active peer that this rank has written (dispatch) or pulled (combine) all its
  /// rows.
  void release_done();

  /// Waits until @p peer_rank has released its done flag of this operation.
  void await_done(int peer_rank);

  /// Ends by an exception.
  void fail(const std::string& reason);

  /// Rows that still move serve nobody: the operation ends at the next release_done().
  bool is_aborted() const { return group_.is_aborted(); }

  /// Raised while rows move, so that waiting peers see progress.
  void progress() {
    auto& activity = endpoint_.own_workspace().activity();
    sync::store_relaxed(activity.progress, ++num_steps_);
  }

  std::byte* resolve(int peer_rank, const Offer& offer);

  /// Nanoseconds this rank has waited for every rank, [num_ranks]; empty when it never waited.
  std::vector<int64_t> take_waited_ns() { return std::move(waited_ns_); }

 private:
  friend class Relay;

  // For a Relay, which stores at the ranks of this node on behalf of a rank of another.
  void store_row(int src_rank, const std::byte* image);
  void store_second_offer(int src_rank, const layout::SecondOffer& second);
  void release_done_of(int src_rank);
  /// Waits under the stall limit of the rail until @p is_ready(); @p peer_rank is waited for.
  void await_rail(int peer_rank, const std::function<bool()>& is_ready);
  /// Aborts and throws because the rail to @p peer_rank failed; gives the reason that other ranks
  /// may have for that a little time to get here first.
  [[noreturn]] void give_up_rail(int peer_rank, const std::string& text);
  /// The same at once.
  [[noreturn]] void abort_rail(int peer_rank, const std::string& text);
  /// A copy of a row, with its flag, in the workspace of every rank of this node.
  template <typename StoreTail>
  void store_row(int src_rank, const layout::Row& header, StoreTail&& store_tail);

  /// Wakes every active rank of this node, after its flag was stored.
  void ring_local_ranks();

  /// Calls @p body(rank_idx) for every active rank of this node. Each rank starts behind itself, so
  /// that no reader gets all flags at the end.
  template <typename Body>
  void for_local_ranks(Body&& body) {
    int peer_rank = group_.rank_idx();
    for (int i = 0; i < num_local_ranks_; ++i) {
      if (++peer_rank == first_local_rank_ + num_local_ranks_)
        peer_rank = first_local_rank_;
      if (group_.is_active(peer_rank))
        body(peer_rank);
    }
  }
  /// Rank whose progress shows that of @p rank_idx: itself, or the one that relays it here.
  int watched_rank(int rank_idx) const {
    return relay_ == nullptr || group_.is_local(rank_idx)
               ? rank_idx
               : group_.nodes().rail_rank(rank_idx, group_.nodes().node_idx(group_.rank_idx()));
  }

  void await_reuse();
  size_t count_bytes() const;  ///< bytes of a row of the count matrix
  void check_closed();
  void exchange_rejection(const RowMessage& row) override;
  /// Shows peers that this rank waits for a flag of @p peer_rank.
  void show_wait(int peer_rank, layout::Phase phase, uint64_t flag_epoch);
  /// Books the time since @p start_ns as waited for @p peer_rank.
  void end_wait(int64_t start_ns, int peer_rank);

  /// Waits until a peer that has entered the operation raised @p flag to @p epoch; its limit is the
  /// stall limit. Nobody may go before its done flag of that epoch is here.
  void await_flag(int peer_rank, layout::Phase phase, uint64_t epoch, const uint64_t& flag);
  void await_row(int peer_rank);
  /// @param is_missing  Whether what is waited for is still to come from a rank.
  template <typename IsMissing>
  group::WaitLadder ladder_for(const IsMissing& is_missing);
  /// Waits for what a peer that has entered does in the operation of @p epoch, until @p ready().
  /// @param shown_phase  Phase of the flag, for peers that ask whom this rank waits for.
  /// @param has_moved  Whether the peer has shown progress since it was asked last.
  /// @param limit_ns   Returns how long it may show none.
  template <typename Ready, typename HasMoved, typename Limit>
  void await_part(int peer_rank,
                  layout::Phase shown_phase,
                  const group::WaitSite& where,
                  uint64_t epoch,
                  const group::WaitLadder& ladder,
                  const Ready& ready,
                  const HasMoved& has_moved,
                  const Limit& limit_ns);
  bool is_done(int peer_rank, uint64_t epoch) const;
  [[noreturn]] void give_up_stalled(int peer_rank, const group::WaitSite& where, int64_t limit_ns);

  Endpoint& endpoint_;
  int first_local_rank_;
  int num_local_ranks_;
  std::unique_ptr<Relay> relay_;
  uint64_t num_steps_ = 0;
  std::vector<int64_t> waited_ns_;
};

/// See run_rejected().
[[noreturn]] void reject_operation(Endpoint& endpoint,
                                   layout::Operation operation,
                                   layout::RowStatus status,
                                   const std::string& message,
                                   const group::InterruptCheck& interrupt_check);

}  // namespace moe::ops
