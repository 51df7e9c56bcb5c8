#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "heap/owned_fd.h"

namespace moe::heap {

// Stream sockets, all non-blocking and CLOEXEC: Unix ones with abstract names, and what holds for
// those of tcp.h too. An abstract name is no file: the kernel forgets it with the process.

/// Callers that may wait to be accepted; the kernel takes the least of this and somaxconn.
constexpr int kListenBacklog = 4096;

/// @throws SystemError
OwnedFd listen_abstract(const std::string& name);

/// A socket on its way to @p name; empty, with errno, when nobody listens (ECONNREFUSED) or the
/// listener is behind (EAGAIN).
/// @throws SystemError  anything else.
OwnedFd connect_abstract(const std::string& name);

/// The next waiting connection, empty if none.
/// @throws SystemError
OwnedFd accept_connection(const OwnedFd& listener);

/// Outcome of a transfer that does not block.
enum class Transfer {
  kMoved,
  kWouldBlock,
  kTryLater,
  kClosed,  ///< the process at the other end closed it
  kLost,    ///< whatever lies between does not answer
};

/// Sends what it can of @p head and then of @p body, and @p passed_fd (-1 for none) along with the
/// first of them.
Transfer send_bytes(
    int socket, std::string_view head, std::string_view body, int passed_fd, size_t* sent_bytes);

/// Receives what is there, with descriptors that came along. @p data is a buffer of @p bytes.
Transfer receive_bytes(
    int socket, char* data, size_t bytes, size_t* received_bytes, std::vector<OwnedFd>* passed_fds);

/// A pidfd of the process at the other end of a Unix socket; empty where the system has none or the
/// process cannot be seen from here. Readable once that process has ended.
OwnedFd peer_pidfd(const OwnedFd& socket);

}  // namespace moe::heap
