#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace moe {

/// State of a peer as this process knows it. Only ever moves from kAlive to one of the others.
enum class PeerState : uint32_t { kAlive = 0, kLeft = 1, kDead = 2 };

/// Small messages between ranks and news of their deaths; what operations need of the sockets.
///
/// Thread-safe. Ranks are those of the widest communicator.
class PeerLink {
 public:
  virtual ~PeerLink() = default;

  virtual int rank_idx() const = 0;
  virtual int num_ranks() const = 0;

  /// State of a peer: pidfd where its pid is visible here, end of its socket otherwise. A relaxed
  /// atomic load.
  virtual PeerState state(int rank_idx) const = 0;

  /// Returns whether a peer counts as dead because nothing between it and this rank answers any
  /// more.
  virtual bool is_link_lost(int /*rank_idx*/) const { return false; }

  /// Sends a small message (<= 1 MiB). Messages of one sender to one (channel, sequence) arrive in
  /// order. Does nothing when the peer is gone. Never waits for a peer that does not read: what
  /// does not fit the socket is queued and sent by the service thread.
  virtual void post(int rank_idx, uint64_t channel, uint64_t sequence, std::string payload) = 0;

  /// Takes the oldest message of @p rank_idx for (channel, sequence), if there is one.
  virtual bool take(int rank_idx, uint64_t channel, uint64_t sequence, std::string* payload) = 0;

  /// Waits until what peers sent before this call can be taken, as far as it has reached this
  /// machine: the service thread reads in its own time, and after a process was stopped it is no
  /// sooner awake than others. At most a second; for errors, not for operations.
  virtual void catch_up() {}

  /// Called by the service thread (and only there) after a message, segment or change of state.
  /// Returns an id for remove_listener(), which returns only when the callback does not run.
  virtual int add_listener(std::function<void()> on_change) = 0;
  virtual void remove_listener(int id) = 0;
};

}  // namespace moe
