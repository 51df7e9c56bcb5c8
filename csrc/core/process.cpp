#include "core/process.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace moe {
namespace {

/// Blocks all signals of this thread; threads that it starts meanwhile inherit that.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &former_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t former_;
};

/// UINT64_MAX where there is none.
uint64_t limit_of(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY)
    return UINT64_MAX;
  return limit.rlim_cur;
}

size_t stack_bytes() {
  pthread_attr_t attributes;
  size_t bytes = 0;
  if (pthread_attr_init(&attributes) == 0) {
    pthread_attr_getstacksize(&attributes, &bytes);
    pthread_attr_destroy(&attributes);
  }
  return bytes;
}

}  // namespace

uint64_t address_space_left_bytes() {
  const uint64_t limit = limit_of(RLIMIT_AS);
  uint64_t pages = 0;
  if (limit == UINT64_MAX || !(std::ifstream("/proc/self/statm") >> pages))
    return limit;
  const uint64_t taken = pages * system_page_bytes();
  return limit - std::min(taken, limit);
}

std::string describe_address_space() {
  const uint64_t limit = limit_of(RLIMIT_AS);
  if (limit == UINT64_MAX)
    return "";
  return concat(
      "; RLIMIT_AS is ", limit, " bytes, of which ", address_space_left_bytes(), " are left");
}

uint64_t system_page_bytes() {
  static const auto page_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return page_bytes;
}

bool map_pages(std::byte* data, uint64_t bytes) {
  // MADV_POPULATE_WRITE; older system headers lack the name.
  return ::madvise(data, bytes, 23) == 0;
}

std::thread start_quiet_thread(const char* deed, std::function<void()> body) {
  const NoSignals no_signals;
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& refused) {
    std::string limits = describe_address_space();
    if (const uint64_t limit = limit_of(RLIMIT_NPROC); limit != UINT64_MAX)
      limits += concat("; RLIMIT_NPROC is ", limit, " threads of the user");
    // Not EAGAIN, which Python would take for an operation that is to be tried again.
    throw SystemError(concat("cannot start the thread that ",
                             deed,
                             ", with a stack of ",
                             stack_bytes(),
                             " bytes: ",
                             refused.code().message(),
                             limits),
                      ENOMEM);
  }
}

}  // namespace moe
