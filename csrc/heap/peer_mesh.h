#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace moe::heap {

/// What this process knows of a peer. Only ever moves from kAlive to one of the others.
enum class PeerState : uint32_t { kAlive = 0, kLeft = 1, kDead = 2 };

/// Unix sockets between all ranks of a communicator tree on one machine, and the service thread that
/// reads them: hears of deaths, maps announced segments, keeps small messages for their readers.
///
/// Ranks are processes, or threads of one process (then a segment is shared by pointer, so that it is
/// mapped once per process).
///
/// Thread-safe after connect(). In a forked child every method throws and the sockets are closed.
class PeerMesh {
 public:
  /// Opens the listening socket (abstract name: nothing is left behind by a killed process).
  static std::shared_ptr<PeerMesh> create();
  virtual ~PeerMesh() = default;

  /// What peers need to connect: bytes for the bootstrap to gather. Includes the machine's boot id,
  /// so that connect() can say which ranks are on another machine.
  virtual std::string address() const = 0;

  /// Connects to every rank and starts the service thread. Collective.
  /// @throws InvalidArgument  ranks on several machines or network namespaces, or a wire version that
  ///   differs; names them.
  /// @throws SystemError  a socket call failed or @p timeout_s passed.
  virtual void connect(int rank_idx, const std::vector<std::string>& addresses, double timeout_s) = 0;

  virtual int rank_idx() const = 0;
  virtual int num_ranks() const = 0;

  /// State of a peer: pidfd where its pid is visible here, end of its socket otherwise. A relaxed
  /// atomic load.
  virtual PeerState state(int rank_idx) const = 0;

  /// Sends a small message (<= 1 MiB). Messages of one sender to one (channel, sequence) arrive in
  /// order. Does nothing when the peer is gone. Never waits for a peer that does not read: what does
  /// not fit the socket is queued and sent by the service thread.
  virtual void post(int rank_idx, uint64_t channel, uint64_t sequence, std::string payload) = 0;

  /// Takes the oldest message of @p rank_idx for (channel, sequence), if there is one.
  virtual bool take(int rank_idx, uint64_t channel, uint64_t sequence, std::string* payload) = 0;

  /// Called by the service thread (and only there) after a message, segment or change of state.
  /// Returns an id for remove_listener(), which returns only when the callback does not run.
  virtual int add_listener(std::function<void()> on_change) = 0;
  virtual void remove_listener(int id) = 0;

  /// Tells every peer that this rank leaves in good order, then stops the service thread and closes
  /// the sockets. Idempotent. Also runs at an orderly process exit.
  virtual void leave() = 0;
};

}  // namespace moe::heap
