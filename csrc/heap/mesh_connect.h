#pragma once

#include <functional>
#include <vector>

#include "heap/owned_fd.h"
#include "heap/wire.h"

namespace moe::heap {

/// Name of the abstract socket on which the owner of an address listens.
std::string listener_name(const Token& mesh_token);

/// Connects this rank to every other: it dials the ranks below its own and answers those above.
///
/// Returns once a Hello of every peer has arrived, so every peer is in this call or past it.
///
/// @return One socket per rank, empty for this rank.
/// @throws PeerFailed  a rank has ended.
/// @throws SystemError  ranks are missing after @p timeout_s; names them.
std::vector<OwnedFd> connect_mesh(int rank_idx,
                                  const std::vector<MeshAddress>& addresses,
                                  const OwnedFd& listener,
                                  double timeout_s,
                                  const std::function<void()>& interrupt_check);

}  // namespace moe::heap
