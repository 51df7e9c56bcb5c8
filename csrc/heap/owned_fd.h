#pragma once

#include <functional>
#include <utility>

#include "heap/fork_guard.h"

namespace moe::heap {

/// A file descriptor with one owner; closed by its destructor, and in every forked child.
class OwnedFd {
 public:
  OwnedFd() = default;
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), origin_(other.origin_) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      origin_ = other.origin_;
    }
    return *this;
  }
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  ~OwnedFd() { reset(); }

  /// Runs @p open_fd, which returns a descriptor or -1 with errno, so that no fork() can come
  /// between the call and the registration. @p open_fd sets CLOEXEC and does not block.
  static OwnedFd open(const std::function<int()>& open_fd);

  /// Adopts a descriptor just made while ForkGuard::lock() is held by the caller.
  static OwnedFd adopt_locked(int fd);

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
  ForkOrigin origin_;
};

}  // namespace moe::heap
