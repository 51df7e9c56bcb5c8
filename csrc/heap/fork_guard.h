#pragma once

#include <cstdint>
#include <mutex>

namespace moe::heap {

/// Guards the heap against fork(): the child has neither the service thread nor the mappings
/// (MADV_DONTFORK), and its copies of the file descriptors would hide the death of this process
/// from peers. So the child closes them before fork() returns there, and every object compares the
/// generation it was made in with the present one.
class ForkGuard {
 public:
  /// The lock of all process-wide state of the heap. fork() waits for it, so that a child never
  /// starts with it held or with half of a change; only calls that do not block may be made under
  /// it.
  static std::unique_lock<std::mutex> lock();

  /// Raised by one in every forked child.
  static uint32_t generation();

  /// Descriptors that a forked child closes. The caller holds lock().
  static void add_fd(int fd);
  static void remove_fd(int fd);
};

/// Remembers the process an object was made in.
class ForkOrigin {
 public:
  ForkOrigin() : generation_(ForkGuard::generation()) {}

  /// Returns whether this process is a forked child of the one the object was made in.
  bool is_forked_child() const { return generation_ != ForkGuard::generation(); }

  /// @throws InvalidArgument  in a forked child; @p what names the object.
  void check(const char* what) const;

 private:
  uint32_t generation_;
};

}  // namespace moe::heap
