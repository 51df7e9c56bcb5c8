#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "group/membership.h"
#include "group/wait_site.h"

namespace moe::group {

/// Cause that ended the operations of a communicator, here and as the others are told: one record
/// until a recovery ends. Thread-safe.
class Aborts {
 public:
  explicit Aborts(const Membership& ranks)
      : ranks_(ranks), own_record_(&ranks.own_control().abort) {}
  Aborts(const Aborts&) = delete;
  Aborts& operator=(const Aborts&) = delete;

  /// Stores the record here and at every living peer, wakes all sleepers. Only the first abort
  /// counts. Ranks of other nodes are sent it.
  void abort(layout::AbortCause cause,
             const WaitSite& site,
             const std::vector<int>& ranks,
             const std::string& message);
  /// Aborts every living peer for what aborted this rank. Does nothing when nobody aborted.
  void spread();
  /// Stores what a rank of another node has sent.
  void store_received(const std::string& message);
  /// Throws what aborted this rank.
  [[noreturn]] void throw_cause() const;

  bool has_aborted() const {
    const uint32_t word = sync::load_relaxed(own_record_->state);
    return word != 0 && layout::AbortRecord::generation(word) >= generation();
  }
  /// layout::AbortRecord::state of this rank. Lives as long as the own control block.
  const uint32_t* word() const { return &own_record_->state; }

  /// Recoveries that have ended.
  uint32_t generation() const { return generation_.load(std::memory_order_relaxed); }
  /// Lets operations that were aborted work again.
  void begin_generation() { generation_.fetch_add(1, std::memory_order_relaxed); }

 private:
  void store(layout::ControlBlock& control, const layout::AbortRecord& record);
  void store_at_peers(const layout::AbortRecord& record);
  /// Returns whether what aborted this rank is known here in full; waits for its writer a little.
  bool await_record() const;

  const Membership& ranks_;
  layout::AbortRecord* own_record_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> posted_{0};  ///< 1 + generation of the last abort sent to other nodes
};

}  // namespace moe::group
