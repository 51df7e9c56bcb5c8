#include "heap/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "core/error.h"

namespace moe::heap {
namespace {

std::atomic<uint32_t> g_generation{0};

struct Guarded {
  std::mutex mutex;
  std::vector<int> fds;
};

void lock_before_fork();
void unlock_in_parent();
void unlock_in_child();

// Never destroyed: threads may still use it while the process exits.
Guarded& guarded() {
  static Guarded* instance = [] {
    auto* made = new Guarded;
    const int error = pthread_atfork(lock_before_fork, unlock_in_parent, unlock_in_child);
    if (error != 0)
      throw SystemError("pthread_atfork failed", error);
    return made;
  }();
  return *instance;
}

void lock_before_fork() {
  guarded().mutex.lock();
}

void unlock_in_parent() {
  guarded().mutex.unlock();
}

void unlock_in_child() {
  Guarded& state = guarded();
  for (const int fd : state.fds)
    ::close(fd);
  state.fds.clear();
  g_generation.fetch_add(1, std::memory_order_relaxed);
  state.mutex.unlock();
}

}  // namespace

std::unique_lock<std::mutex> ForkGuard::lock() {
  return std::unique_lock(guarded().mutex);
}

uint32_t ForkGuard::generation() {
  return g_generation.load(std::memory_order_relaxed);
}

void ForkGuard::add_fd(int fd) {
  guarded().fds.push_back(fd);
}

void ForkGuard::remove_fd(int fd) {
  std::vector<int>& fds = guarded().fds;
  const auto found = std::find(fds.begin(), fds.end(), fd);
  if (found == fds.end())
    return;
  *found = fds.back();
  fds.pop_back();
}

void ForkOrigin::check(const char* what) const {
  MOE_CHECK(!is_forked_child(),
            what,
            " was made in the process that forked this one (fork ",
            generation_,
            ", now ",
            ForkGuard::generation(),
            "): its sockets and memory do not exist here; make a new one in the child, or start "
            "workers by 'spawn'");
}

}  // namespace moe::heap
