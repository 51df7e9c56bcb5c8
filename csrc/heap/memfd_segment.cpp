#include "heap/memfd_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "core/error.h"
#include "core/process.h"
#include "heap/machine_memory.h"

namespace moe::heap {
namespace {

// Values of the kernel's interface; older system headers lack the names.
constexpr int kMadvCollapse = 25;
constexpr unsigned kMfdNoExecSeal = 8;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Left to the rest of the machine when a segment takes nearly all of it.
constexpr uint64_t kSpareBytes = uint64_t{32} << 20;

// Faulted in between two looks at what the machine has left.
constexpr uint64_t kFaultStepBytes = uint64_t{8} << 20;

// Each failure may have made the kernel compact memory, which takes long.
constexpr int kMostCollapseFailures = 8;

/// @param limit_bytes  Of a segment, where something else than the machine limits it.
[[noreturn]] void throw_capacity(uint64_t bytes,
                                 const std::string& cause,
                                 uint64_t limit_bytes = UINT64_MAX) {
  const uint64_t available = machine_available_bytes();
  throw CapacityError(concat("cannot get ",
                             bytes,
                             " bytes of shared memory: ",
                             cause,
                             "; the machine has ",
                             available,
                             " bytes available"),
                      bytes,
                      std::min(available, limit_bytes));
}

[[noreturn]] void throw_refused(uint64_t bytes, const char* call, int error) {
  const std::string cause = concat(call, " failed: ", std::strerror(error));
  if (error == EMFILE || error == ENFILE)
    throw SystemError(concat("cannot make a segment of ", bytes, " bytes: ", cause), error);
  throw_capacity(bytes, cause + describe_address_space(), address_space_left_bytes());
}

void check_machine(uint64_t bytes) {
  const uint64_t available = machine_available_bytes();
  if (available < kSpareBytes || bytes > available - kSpareBytes)
    throw_capacity(bytes, concat(kSpareBytes, " bytes must stay free"));
}

/// Beyond this limit ftruncate() does not fail but kills the process by SIGXFSZ.
void check_file_size_limit(uint64_t bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      bytes > limit.rlim_cur)
    throw_capacity(
        bytes, concat("RLIMIT_FSIZE is ", limit.rlim_cur, " bytes"), uint64_t{limit.rlim_cur});
}

int open_memfd() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  // Systems with vm.memfd_noexec = 2 insist on the flag, kernels before 6.3 do not know it.
  const int fd = static_cast<int>(::syscall(SYS_memfd_create, "moe_comm", kFlags | kMfdNoExecSeal));
  if (fd >= 0 || errno != EINVAL)
    return fd;
  return static_cast<int>(::syscall(SYS_memfd_create, "moe_comm", kFlags));
}

/// @return Null with errno when mmap refuses.
std::shared_ptr<Segment> map_shared(int memfd, uint64_t bytes) {
  const uint64_t reserved_bytes = bytes + kHugePageBytes;
  void* reserved = ::mmap(
      nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED)
    return nullptr;
  auto* start = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<uintptr_t>(start);
  const uint64_t lead_bytes = (kHugePageBytes - address % kHugePageBytes) % kHugePageBytes;
  std::byte* aligned = start + lead_bytes;
  void* mapped = ::mmap(aligned, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, reserved_bytes);
    errno = error;
    return nullptr;
  }
  if (lead_bytes > 0)
    ::munmap(start, lead_bytes);
  ::munmap(aligned + bytes, reserved_bytes - lead_bytes - bytes);
  ::madvise(aligned, bytes, MADV_DONTFORK);
  return std::make_shared<Segment>(aligned, bytes);
}

/// Populates without a signal where the kernel can (5.14), else touches every page.
void populate(std::byte* data, uint64_t bytes) {
  if (map_pages(data, bytes))
    return;
  const int error = errno;
  if (error != EINVAL && error != ENOSYS)
    throw_refused(bytes, "madvise(MADV_POPULATE_WRITE)", error);
  const uint64_t page_bytes = system_page_bytes();
  for (uint64_t offset = 0; offset < bytes; offset += page_bytes) {
    // An atomic add of zero: dirties the page, keeps what a peer may be writing there.
    __atomic_fetch_add(reinterpret_cast<uint8_t*>(data + offset), uint8_t{0}, __ATOMIC_RELAXED);
  }
}

/// Puts what it can of a range into 2 MiB pages; @return bytes of it that are.
uint64_t collapse(std::byte* data, uint64_t bytes, int* num_failures) {
  uint64_t huge_bytes = 0;
  if (reinterpret_cast<uintptr_t>(data) % kHugePageBytes != 0)
    return huge_bytes;
  for (uint64_t offset = 0; offset + kHugePageBytes <= bytes; offset += kHugePageBytes) {
    // MADV_COLLAPSE refuses a range without any page.
    populate(data + offset, system_page_bytes());
    if (::madvise(data + offset, kHugePageBytes, kMadvCollapse) == 0)
      huge_bytes += kHugePageBytes;
    else if (errno == EINVAL || errno == ENOSYS)
      *num_failures = kMostCollapseFailures;  // not offered here
    else
      ++*num_failures;
    if (*num_failures >= kMostCollapseFailures)
      break;
  }
  return huge_bytes;
}

}  // namespace

Segment::~Segment() {
  if (!origin_.is_forked_child())  // there the addresses may hold something else
    ::munmap(data_, bytes_);
}

uint64_t fault_in(std::byte* data, uint64_t bytes, bool with_huge_pages) {
  int num_failures = 0;
  uint64_t huge_bytes = 0;
  for (uint64_t offset = 0; offset < bytes; offset += kFaultStepBytes) {
    // The kernel kills rather than refuse, so look again: other ranks may be growing as well.
    check_machine(bytes - offset);
    const uint64_t step_bytes = std::min(kFaultStepBytes, bytes - offset);
    if (with_huge_pages && num_failures < kMostCollapseFailures)
      huge_bytes += collapse(data + offset, step_bytes, &num_failures);
    // Maps what is there, allocates what collapsing left out.
    populate(data + offset, step_bytes);
  }
  return huge_bytes;
}

bool return_pages(std::byte* data, uint64_t bytes) {
  return ::madvise(data, bytes, MADV_REMOVE) == 0;
}

NewSegment create_segment(uint64_t bytes, bool with_huge_pages) {
  check_file_size_limit(bytes);
  NewSegment made;
  made.memfd = OwnedFd::open(open_memfd);
  if (!made.memfd)
    throw_refused(bytes, "memfd_create", errno);
  if (::ftruncate(made.memfd.get(), static_cast<off_t>(bytes)) != 0)
    throw_refused(bytes, "ftruncate", errno);
  if (::fcntl(made.memfd.get(), F_ADD_SEALS, kSeals) != 0)
    throw_refused(bytes, "fcntl(F_ADD_SEALS)", errno);
  made.segment = map_shared(made.memfd.get(), bytes);
  if (made.segment == nullptr)
    throw_refused(bytes, "mmap", errno);
  made.huge_page_bytes = fault_in(made.segment->data(), bytes, with_huge_pages);
  return made;
}

std::shared_ptr<Segment> map_peer_segment(int memfd, uint64_t bytes) {
  struct stat status{};
  if (::fstat(memfd, &status) != 0)
    throw SystemError("fstat of an announced segment failed", errno);
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  if (static_cast<uint64_t>(status.st_size) != bytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw SystemError(concat("an announced segment has ",
                             status.st_size,
                             " bytes and seals ",
                             seals,
                             ", expected ",
                             bytes,
                             " bytes and F_SEAL_SHRINK (",
                             F_SEAL_SHRINK,
                             ")"),
                      EINVAL);
  std::shared_ptr<Segment> segment = map_shared(memfd, bytes);
  if (segment == nullptr)
    throw SystemError(
        concat(
            "mmap of an announced segment of ", bytes, " bytes failed", describe_address_space()),
        errno);
  return segment;
}

uint64_t huge_page_bytes_in_smaps(const std::byte* data, uint64_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(data);
  const uintptr_t last = first + bytes;
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool is_inside = false;
  uint64_t found_bytes = 0;
  while (std::getline(smaps, line)) {
    unsigned long start = 0;
    unsigned long end = 0;
    unsigned long kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &start, &end) == 2)
      is_inside = start < last && end > first;
    else if (is_inside && (std::sscanf(line.c_str(), "ShmemPmdMapped: %lu kB", &kib) == 1 ||
                           std::sscanf(line.c_str(), "FilePmdMapped: %lu kB", &kib) == 1))
      found_bytes += uint64_t{kib} * 1024;
  }
  return std::min(found_bytes, bytes);
}

}  // namespace moe::heap
