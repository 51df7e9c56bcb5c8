#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/peer_link.h"
#include "heap/memfd_segment.h"
#include "heap/owned_fd.h"
#include "heap/segment_table.h"
#include "heap/tcp.h"

namespace moe::heap {

/// Memory of a peer that is no file, such as a GPU's.
struct AnnouncedMemory {
  uint32_t segment_idx = 0;
  uint64_t bytes = 0;
  std::string description;      ///< text that says how to open it
  std::shared_ptr<OwnedFd> fd;  ///< null where the owner passed none
};

/// Sockets between all ranks of a communicator tree, and the service thread that reads them: hears
/// of deaths, maps announced segments, keeps small messages for their readers.
///
/// Unix sockets within a node, TCP between nodes, also on one machine. Memory is announced to ranks
/// of the same node alone: nothing of other nodes is ever mapped.
///
/// Ranks are processes, or threads of one process (then a segment is shared by pointer, so that it
/// is mapped once per process).
///
/// Thread-safe after connect(). In a forked child the sockets are closed and every method throws,
/// but for leave() and remove_listener(), which have nothing left to do there.
class PeerMesh : public PeerLink {
 public:
  struct ConnectOptions {
    double timeout_s = 0;
    /// Called about ten times a second while waiting; what it throws ends the call.
    std::function<void()> interrupt_check;
    int num_local_ranks = 0;  ///< ranks of a node; 0 for one node
    /// A machine of another node that does not answer for so long counts as dead; less than
    /// kLeastLinkTimeoutS is taken as that.
    double link_timeout_s = 0;
  };

  /// Opens the listening socket (abstract name: nothing is left behind by a killed process), and a
  /// TCP one where there are to be several nodes.
  /// @throws InvalidArgument, SystemError
  static std::shared_ptr<PeerMesh> create(const std::optional<TcpOptions>& tcp = std::nullopt);
  virtual ~PeerMesh() = default;

  /// Bytes that peers need to connect, for the bootstrap to gather. Among them the boot id,
  /// so that connect() can say which ranks of a node are on another machine.
  virtual std::string address() const = 0;

  /// Connects to every rank and starts the service thread. Collective: returns once every peer has
  /// connected too.
  /// @throws InvalidArgument  ranks of one node on several machines or network namespaces, or a
  ///   wire version that differs; names them.
  /// @throws PeerFailed  a rank has ended before it was connected.
  /// @throws SystemError  a socket call failed or timeout_s passed; names the ranks that are
  ///   missing.
  virtual void connect(int rank_idx,
                       const std::vector<std::string>& addresses,
                       const ConnectOptions& options) = 0;

  /// Tells every peer of this node of a segment of this rank, before anything in it is offered.
  /// Segments are numbered from 0.
  /// @param memfd  Closed once every peer has been sent it.
  virtual void announce_segment(uint32_t segment_idx,
                                const std::shared_ptr<Segment>& segment,
                                OwnedFd memfd) = 0;

  /// Tells every peer of this node of memory of this rank that is no file, in a numbering of its
  /// own. Every one takes it with take_memory(); listeners are called when it has arrived.
  virtual void announce_memory(const AnnouncedMemory& memory) = 0;

  /// Takes the oldest announcement of that kind of @p rank_idx, if there is one.
  virtual bool take_memory(int rank_idx, AnnouncedMemory* memory) = 0;

  /// A segment that a peer announced, or null. Takes no lock.
  virtual const SegmentTable::Entry* find_segment(int rank_idx, uint32_t segment_idx) const = 0;

  /// Bytes of all peers' segments mapped here.
  virtual uint64_t peer_segment_bytes() const = 0;

  /// Tells every peer that this rank leaves in good order, then stops the service thread and closes
  /// the sockets. Idempotent. Also runs at an orderly process exit.
  virtual void leave() = 0;
};

}  // namespace moe::heap
