#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/sync.h"
#include "group/membership.h"

namespace moe::group {

/// Memory of this rank that it has no more use for and that peers may still write to. Thread-safe.
class RetiredMemory {
 public:
  explicit RetiredMemory(const Membership& ranks) : ranks_(ranks) {}
  /// In a process that is not a forked child, sets aside for good what peers may still write to.
  ~RetiredMemory();
  RetiredMemory(const RetiredMemory&) = delete;
  RetiredMemory& operator=(const RetiredMemory&) = delete;

  /// Keeps a window that peers of an aborted operation may still write to, until recovery.
  void quarantine(std::shared_ptr<Window> window);

  /// Keeps memory of the caller's that peers of an aborted operation may still write to, until
  /// recovery; for good if there is none.
  void keep(std::shared_ptr<void> memory);

  /// Peers have recovered: nobody writes to what was kept for that. @return the caller's, to be let
  /// go of where no lock is held: that may run Python.
  std::vector<std::shared_ptr<void>> release();

  /// Tells peers that this rank has destroyed a buffer, and keeps its control area until every peer
  /// has destroyed its own: one may be about to write there, and learns of the end from its own.
  /// @param windows     The control area, all of its parts.
  /// @param peer_words  This rank's word in each peer's area, by rank; null where there is none.
  /// @param own_words   Each peer's word in the control area, by rank; null for one that never
  ///   writes there.
  /// @param next_epoch  First operation that this rank takes no part in, >= 1: what peers read in
  ///   their words.
  void close_control(std::vector<std::shared_ptr<Window>> windows,
                     const std::vector<uint64_t*>& peer_words,
                     std::vector<const uint64_t*> own_words,
                     uint64_t next_epoch);

  /// Gives back the control areas that every peer has closed.
  void free_closed();

 private:
  struct ClosedControl {
    std::vector<std::shared_ptr<Window>> windows;
    std::vector<const uint64_t*> closed_words;  ///< by rank
  };

  const Membership& ranks_;
  sync::Mutex mutex_;
  std::vector<std::shared_ptr<Window>> quarantined_;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<ClosedControl> closed_;
};

}  // namespace moe::group
