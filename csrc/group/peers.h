#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "group/aborts.h"
#include "group/mail.h"
#include "group/membership.h"
#include "group/shrink_ballots.h"
#include "group/wait_site.h"

namespace moe::group {

/// The ranks of one communicator to one that waits for some of them: what they say meanwhile, and
/// what ends its waits. Thread-safe, except for the number of the next collective call.
class Peers : public Membership {
 public:
  using Membership::Membership;

  Mail& mail() { return mail_; }
  ShrinkBallots& shrink_ballots() { return shrink_ballots_; }
  /// Number of the next collective call, equal on every rank: names a buffer made by that call.
  uint64_t next_gather_sequence() const { return gather_sequence_; }
  void set_next_gather_sequence(uint64_t sequence) { gather_sequence_ = sequence; }

  /// Aborts the communicator: only the first abort counts.
  void abort(layout::AbortCause cause,
             const WaitSite& site,
             const std::vector<int>& ranks,
             const std::string& message) {
    aborts_.abort(cause, site, ranks, message);
  }
  /// Aborts every living peer for what aborted this rank. An operation that ends by it calls this
  /// before its caller may write to what peers read: a peer that read it hears of the abort before
  /// it takes what it read for good. Does nothing when nobody aborted.
  void spread_abort() { aborts_.spread(); }
  bool is_aborted() const { return aborts_.has_aborted(); }
  /// Throws what aborted the communicator, if anything did. One relaxed load otherwise.
  void check_abort() {
    if (is_aborted()) [[unlikely]]
      throw_abort();
  }
  [[noreturn]] void throw_abort() {
    check_evicted();
    aborts_.throw_cause();
  }
  /// Throws where others go on without this rank, which they say before this rank can find out.
  void check_evicted() {
    link()->catch_up();
    shrink_ballots_.check_evicted();
  }
  /// For waits that call nothing here, such as those of kernels: layout::AbortRecord::state
  /// of this rank, which counts once its generation is at least generation(). Lives as long as
  /// abort_memory().
  const uint32_t* abort_word() const { return aborts_.word(); }
  std::shared_ptr<const void> abort_memory() const { return control_memory(); }
  /// Recoveries that have ended.
  uint32_t generation() const { return aborts_.generation(); }

 private:
  uint64_t gather_sequence_ = 0;
  Aborts aborts_{*this};
  Mail mail_{*this, aborts_};
  ShrinkBallots shrink_ballots_{*this};
};

}  // namespace moe::group
