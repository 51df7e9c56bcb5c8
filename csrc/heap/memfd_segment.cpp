#include "heap/memfd_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "core/error.h"
#include "core/process.h"
#include "heap/huge_pages.h"
#include "heap/machine_memory.h"

namespace moe::heap {
namespace {

// Value of the kernel's interface; older system headers lack the name.
constexpr unsigned kMfdNoExecSeal = 8;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

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

}  // namespace

Segment::~Segment() {
  if (!origin_.is_forked_child())  // there the addresses may hold something else
    ::munmap(data_, bytes_);
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

}  // namespace moe::heap
