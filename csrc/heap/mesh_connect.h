#pragma once

#include <functional>
#include <vector>

#include "core/node_layout.h"
#include "heap/owned_fd.h"
#include "heap/wire.h"

namespace moe::heap {

/// Name of the abstract socket on which the owner of an address listens.
std::string listener_name(const Token& mesh_token);

/// Sockets at which peers reach this rank until all have.
struct Listeners {
  OwnedFd unix_socket;
  OwnedFd tcp_socket;  ///< empty with one node
};

/// Connects this rank to every other: it dials the ranks below its own and answers those above.
/// Ranks of a node meet in Unix sockets, others over TCP.
///
/// Returns once a Hello of every peer has arrived, so every peer is in this call or past it.
///
/// @return One socket per rank, empty for this rank.
/// @throws PeerFailed  a rank has ended.
/// @throws SystemError  ranks are missing after @p timeout_s; names them.
std::vector<OwnedFd> connect_mesh(int rank_idx,
                                  const std::vector<MeshAddress>& addresses,
                                  const NodeLayout& nodes,
                                  const Listeners& listeners,
                                  double timeout_s,
                                  const std::function<void()>& interrupt_check);

}  // namespace moe::heap
