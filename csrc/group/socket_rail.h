#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/peer_link.h"
#include "core/rail.h"

namespace moe::group {

/// Stream of messages that a SocketRail uses of the sockets: no two rails of a communicator tree
/// have the same, so that nothing one has left on the way is taken by another.
struct SocketRailStream {
  uint64_t channel = 0;        ///< channel of the communicator, with Group's bits for rails
  uint64_t buffer_number = 0;  ///< < 2^31
  uint32_t generation = 0;     ///< generation of the communicator, raised by every recovery
};

/// The rail over the communicator's own sockets: where there is no other engine.
///
/// A transfer is cut into frames, which travel as messages of the link. At most kWindowFrames of
/// them are on the way to one node: the receiver grants the next ones as it takes frames, so that a
/// slow receiver leaves the rest with the sender. The link's service thread moves what callers
/// have started; nobody waits in a call.
class SocketRail final : public Rail {
 public:
  static constexpr uint64_t kFrameBytes = uint64_t{256} << 10;
  static constexpr uint64_t kWindowFrames = 32;

  /// @param link        Sockets of the widest communicator.
  /// @param link_ranks  Rank of the rail on each node in the widest communicator, by node; -1 for a
  ///   rank that takes no part any more.
  /// @param node_idx    Node of this rank.
  /// Local: nothing is sent.
  SocketRail(std::shared_ptr<PeerLink> link,
             std::vector<int> link_ranks,
             int node_idx,
             const SocketRailStream& stream);
  ~SocketRail() override;
  SocketRail(const SocketRail&) = delete;
  SocketRail& operator=(const SocketRail&) = delete;

  std::string name() const override { return "sockets"; }
  std::shared_ptr<Transfer> send(int node_idx,
                                 Buffer buffer,
                                 uint64_t offset,
                                 uint64_t bytes) override;
  std::shared_ptr<Transfer> receive(int node_idx,
                                    Buffer buffer,
                                    uint64_t offset,
                                    uint64_t bytes) override;
  void set_listener(std::function<void()> on_change) override;
  void give_up(const std::string& reason) override;
  uint64_t sent_bytes() const override;
  uint64_t received_bytes() const override;

 private:
  class Engine;

  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<Engine> engine_;
  int listener_id_ = -1;
  int process_id_;
};

class Group;

/// The rail of this rank over the sockets of @p group, for the buffer of that number; a new one is
/// made after every recovery. Local.
std::shared_ptr<Rail> make_socket_rail(Group& group, uint64_t buffer_number);

}  // namespace moe::group
