#include "heap/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace moe::heap {
namespace {

constexpr int kMaxPassedFds = 8;
constexpr int kSoPeerPidfd = 77;  // SO_PEERPIDFD, Linux 6.5

struct AbstractName {
  sockaddr_un address{};
  socklen_t bytes = 0;
};

AbstractName abstract_name(const std::string& name) {
  AbstractName result;
  result.address.sun_family = AF_UNIX;
  // A leading zero byte makes the name abstract; its length is part of it.
  MOE_CHECK(name.size() < sizeof result.address.sun_path,
            "socket name of ",
            name.size(),
            " bytes, at most ",
            sizeof result.address.sun_path - 1,
            " fit");
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());
  result.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

OwnedFd open_socket() {
  OwnedFd fd = OwnedFd::open(
      [] { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!fd)
    throw SystemError("socket failed", errno);
  return fd;
}

/// End of a socket that reports @p error.
Transfer end_of(int error) {
  switch (error) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
    case ENETRESET:
      return Transfer::kLost;
    default:
      return Transfer::kClosed;
  }
}

}  // namespace

OwnedFd listen_abstract(const std::string& name) {
  OwnedFd listener = open_socket();
  const AbstractName bound = abstract_name(name);
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&bound.address), bound.bytes) != 0)
    throw SystemError("bind of an abstract Unix socket failed", errno);
  if (::listen(listener.get(), kListenBacklog) != 0)
    throw SystemError("listen failed", errno);
  return listener;
}

OwnedFd connect_abstract(const std::string& name) {
  OwnedFd socket = open_socket();
  const AbstractName target = abstract_name(name);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&target.address), target.bytes) ==
      0)
    return socket;
  const int error = errno;
  if (error != EAGAIN && error != ECONNREFUSED && error != EINTR)
    throw SystemError("connect to an abstract Unix socket failed", error);
  socket.reset();
  errno = error == EINTR ? EAGAIN : error;
  return socket;
}

OwnedFd accept_connection(const OwnedFd& listener) {
  OwnedFd socket = OwnedFd::open(
      [&] { return ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
  if (!socket && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
    throw SystemError("accept failed", errno);
  return socket;
}

Transfer send_bytes(
    int socket, std::string_view head, std::string_view body, int passed_fd, size_t* sent_bytes) {
  iovec pieces[2] = {{const_cast<char*>(head.data()), head.size()},
                     {const_cast<char*>(body.data()), body.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = 2;
  if (passed_fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &passed_fd, sizeof passed_fd);
  }
  while (true) {
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      *sent_bytes = static_cast<size_t>(sent);
      return Transfer::kMoved;
    }
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:
        return Transfer::kWouldBlock;
      case ENOBUFS:
      case ENOMEM:
      case ETOOMANYREFS:  // too many descriptors of this user are in flight
        return Transfer::kTryLater;
      default:
        return end_of(errno);
    }
  }
}

Transfer receive_bytes(int socket,
                       char* data,
                       size_t bytes,
                       size_t* received_bytes,
                       std::vector<OwnedFd>* passed_fds) {
  iovec piece{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxPassedFds)];
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  // fork() must not see a received descriptor before it is registered.
  const auto lock = ForkGuard::lock();
  ssize_t received = 0;
  do {
    received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received < 0)
    return errno == EAGAIN ? Transfer::kWouldBlock : end_of(errno);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
      continue;
    const size_t num_fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < num_fds; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      passed_fds->push_back(OwnedFd::adopt_locked(fd));
    }
  }
  if (received == 0)
    return Transfer::kClosed;
  *received_bytes = static_cast<size_t>(received);
  return Transfer::kMoved;
}

OwnedFd peer_pidfd(const OwnedFd& socket) {
  OwnedFd direct = OwnedFd::open([&] {
    int fd = -1;
    socklen_t bytes = sizeof fd;
    return ::getsockopt(socket.get(), SOL_SOCKET, kSoPeerPidfd, &fd, &bytes) == 0 ? fd : -1;
  });
  if (direct)
    return direct;
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0 ||
      credentials.pid <= 0)
    return OwnedFd();
  OwnedFd opened = OwnedFd::open(
      [&] { return static_cast<int>(::syscall(SYS_pidfd_open, credentials.pid, 0)); });
  // The pid may have passed to another process, unless the peer still holds its socket now.
  pollfd state{socket.get(), POLLRDHUP, 0};
  if (opened && (::poll(&state, 1, 0) != 0))
    opened.reset();
  return opened;
}

}  // namespace moe::heap
