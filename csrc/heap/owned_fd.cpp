#include "heap/owned_fd.h"

#include <unistd.h>

#include <cerrno>

namespace moe::heap {

OwnedFd OwnedFd::open(const std::function<int()>& open_fd) {
  const auto lock = ForkGuard::lock();
  const int fd = open_fd();
  if (fd < 0)
    return OwnedFd();
  return adopt_locked(fd);
}

OwnedFd OwnedFd::adopt_locked(int fd) {
  OwnedFd owned;
  owned.fd_ = fd;
  ForkGuard::add_fd(fd);
  return owned;
}

void OwnedFd::reset() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || origin_.is_forked_child())  // the child's number may belong to somebody else
    return;
  const int saved_errno = errno;
  const auto lock = ForkGuard::lock();
  ForkGuard::remove_fd(fd);
  ::close(fd);
  errno = saved_errno;
}

}  // namespace moe::heap
