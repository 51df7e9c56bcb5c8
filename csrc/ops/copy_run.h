#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ops/batched_copy.h"

namespace moe::host {

/// One run of a batched copy: its epoch, and the steps it is made of.
///
/// Every rank publishes a row, reads all rows, compares its sends with the receives of its peers,
/// and publishes a verdict; data moves when all verdicts are good. Then ranks write in place, fill
/// the slots of others and empty their own, in whatever order peers allow.
class CopyRun {
 public:
  /// Takes the run's epoch. @throws  what makes the communicator unusable.
  CopyRun(BatchedCopy& engine, const InterruptCheck& interrupt_check);

  CopyStats execute(PreparedCopies& prepared);

  /// Publishes a row that says what is wrong here, then throws it as every rank does.
  [[noreturn]] void reject(const std::string& message);

  /// Ends by an exception: aborts the communicator unless every rank knows the same end, and waits
  /// a little for peers to write here no more; @p prepared (may be null) outlives them in any case.
  void fail(const std::string& reason, const std::shared_ptr<PreparedCopies>& prepared);

 private:
  // The protocol (copy_run.cpp).
  void check_closed() const;
  void publish_row(layout::RowStatus status,
                   const std::string& message,
                   PreparedCopies* prepared,
                   const CapacityError* shortage);
  void collect_rows();
  void publish_verdict(const std::string& problem);
  void collect_verdicts();
  [[noreturn]] void reject_short(const CapacityError& error);
  void raise_agreed();
  void settle();
  void release_done();

  // Who moves what (copy_match.cpp).
  std::string match(PreparedCopies& prepared);
  void store_order(const PreparedCopies::Route& route);
  void route_incoming(PreparedCopies& prepared);

  // The data (copy_move.cpp).
  struct Channel;
  struct Part;
  void move(PreparedCopies::Route& route);
  std::vector<Channel> open_channels(const PreparedCopies::Route& route);
  int64_t ready_slots(const Channel& channel) const;
  void copy_part(const PreparedCopies::Route& route, const Part& part, StoreMode mode);
  void end_part(const Part& part);
  void await_done(const PreparedCopies::Route& route);

  // Waiting (copy_waits.cpp).
  void await_row(int peer_rank);
  /// Waits until @p ready() for ranks that have entered, of which is_awaited(rank) tells.
  void await_entered(layout::Phase phase,
                     const std::function<bool()>& ready,
                     const std::function<bool(int)>& is_awaited);
  bool is_missing(int peer_rank) const;
  WaitSite site(layout::Phase phase) const;
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
  Group& group_;
  const InterruptCheck& interrupt_check_;
  uint64_t epoch_ = 0;
  layout::Phase step_ = layout::Phase::kRows;
  bool has_ended_ = false;
  bool may_be_written_to_ = false;     ///< peers have this rank's verdict
  std::vector<layout::CopyRow> rows_;  ///< [num_ranks], private copies
};

}  // namespace moe::host
