#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/peer_link.h"

namespace moe::heap {

/// Unix sockets between all ranks of a communicator tree on one machine, and the service thread that
/// reads them: hears of deaths, maps announced segments, keeps small messages for their readers.
///
/// Ranks are processes, or threads of one process (then a segment is shared by pointer, so that it is
/// mapped once per process).
///
/// Thread-safe after connect(). In a forked child every method throws and the sockets are closed.
class PeerMesh : public PeerLink {
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

  /// Tells every peer that this rank leaves in good order, then stops the service thread and closes
  /// the sockets. Idempotent. Also runs at an orderly process exit.
  virtual void leave() = 0;
};

}  // namespace moe::heap
