#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "group/entry_waits.h"
#include "group/peers.h"

namespace moe::group {

/// A wait for a peer that probes of others follow as long as it lives.
class ShownWait {
 public:
  /// @param what  "to enter combine of buffer 3, epoch 7": what the peer has to do.
  ShownWait(
      Peers& peers, uint64_t buffer_number, uint64_t epoch, int peer_rank, const std::string& what);
  ~ShownWait();
  ShownWait(const ShownWait&) = delete;
  ShownWait& operator=(const ShownWait&) = delete;

  int peer_rank() const { return peer_rank_; }
  const EntryWait& wait() const { return *wait_; }

 private:
  Peers& peers_;
  int peer_rank_;
  std::shared_ptr<EntryWait> wait_;
};

/// Finds out whether a peer that does not enter what this rank is in waits itself, in another call,
/// for what cannot come before this rank goes on.
///
/// A probe goes from the waiting rank to the one it waits for, and from each rank that cannot come
/// before a wait of its own has ended to the rank which that one is for. A probe that comes back
/// to its wait has found a circle: nobody in it can go on. A rank hands a probe on only while it
/// has not entered what the sender waits for, so that all waits of the circle last until then.
class DeadlockWatch {
 public:
  /// @param site  Site that the peer has to enter; outlives this.
  /// @param start_ns  Time since which it is waited for.
  DeadlockWatch(Peers& peers, const WaitSite& site, int peer_rank, int64_t start_ns);
  DeadlockWatch(const DeadlockWatch&) = delete;
  DeadlockWatch& operator=(const DeadlockWatch&) = delete;

  /// Called now and then while the peer has not come. Aborts and throws where it cannot.
  /// @param is_missing  Whether a rank has not entered; fewer ranks are to blame than are not.
  void check(int64_t now_ns, const std::function<bool(int)>& is_missing);

 private:
  [[noreturn]] void give_up(const std::string& circle, const std::function<bool(int)>& is_missing);

  Peers& peers_;
  const WaitSite& site_;
  int peer_rank_;
  int64_t start_ns_;
  int64_t asked_ns_;
  std::optional<ShownWait> shown_;  ///< once it has lasted a little
};

/// Hands on the probes that peers have sent. Called by the service thread.
void answer_probes(Peers& peers);

}  // namespace moe::group
