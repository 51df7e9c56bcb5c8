#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ops/batched_copy.h"
#include "ops/buffer_operation.h"

namespace moe::ops {

/// One run of a batched copy: its epoch, and the steps it is made of.
///
/// Every rank publishes a row, reads all rows, compares its sends with the receives of its peers,
/// and publishes a verdict; data moves when all verdicts are good. Then ranks write in place, fill
/// the slots of others and empty their own, in whatever order peers allow.
class CopyRun : public BufferOperation {
 public:
  CopyRun(BatchedCopy& engine,
          layout::Operation operation,
          const group::InterruptCheck& interrupt_check);

  ~CopyRun() override;

  CopyStats execute(const std::shared_ptr<PreparedCopies>& prepared, bool with_checksums);

  /// Ends by an exception. Waits a little for peers to write here no more; what was prepared
  /// outlives them in any case.
  void fail(const std::string& reason);

 private:
  // The protocol (copy_run.cpp).
  void check_closed();
  void exchange_rejection(const RowMessage& row) override;
  void publish_row(const RowMessage& message);
  void collect_rows();
  void publish_verdict(const RankProblem& problem);
  void collect_verdicts();
  void raise_agreed();
  void settle();
  void release_done();

  // Match of both ends (copy_match.cpp).
  RankProblem match(PreparedCopies& prepared);
  std::string compare_ends(const PreparedCopies& prepared, std::vector<uint32_t>* entry_of);
  void route_outgoing(PreparedCopies& prepared, const std::vector<uint32_t>& entry_of);
  void route_slots(PreparedCopies& prepared,
                   const std::vector<uint32_t>& entry_of,
                   const std::vector<uint32_t>& sends);
  layout::ReceiveTable table_of(int peer_rank);
  void offer_slots(const PreparedCopies::Route& route);
  void store_order(const PreparedCopies::Route& route);
  void route_incoming(PreparedCopies& prepared);

  // The data (copy_move.cpp).
  struct Channel;
  struct Part;
  void move(PreparedCopies::Route& route);
  std::vector<Channel> open_channels(const PreparedCopies::Route& route);
  int64_t num_emptied(const Channel& channel, int reader) const;
  int64_t ready_slots(const Channel& channel) const;
  bool awaits(const Channel& channel, int peer_rank) const;
  void copy_part(const PreparedCopies::Route& route, const Part& part, cpu::StoreMode mode);
  void end_part(const Part& part);
  void await_done(const PreparedCopies::Route& route);

  // Waiting.
  void await_row(int peer_rank);
  /// Waits until @p ready() for ranks that have entered, of which is_awaited(rank) tells.
  void await_entered(layout::Phase phase,
                     const std::function<bool()>& ready,
                     const std::function<bool(int)>& is_awaited);
  bool is_missing(int peer_rank) const;
  void progress();

  template <typename Body>
  void for_active_peers(Body&& body) const {
    // Each rank starts behind itself, so that no peer is served last by all.
    for (int offset = 1; offset < group_.num_ranks(); ++offset) {
      const int peer_rank = (group_.rank_idx() + offset) % group_.num_ranks();
      if (group_.is_active(peer_rank))
        body(peer_rank);
    }
  }

  BatchedCopy& engine_;
  std::shared_ptr<PreparedCopies> prepared_;  ///< null until a row has said what it holds
  bool with_checksums_ = false;               ///< sources are hashed as they are copied
  bool is_writing_ = false;                   ///< shared memory is held until the run has ended
  bool may_be_written_to_ = false;            ///< peers have this rank's verdict
  std::vector<layout::CopyRow> rows_;         ///< [num_ranks], private copies
  /// [num_ranks], slots that peers fill for this rank.
  std::vector<std::vector<layout::OfferedSlots>> offered_here_;
  std::vector<const Window*> own_slots_;  ///< windows with the slots of each outgoing stream
};

}  // namespace moe::ops
