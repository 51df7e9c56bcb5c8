#include "heap/share_in_place.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/math.h"
#include "core/process.h"
#include "heap/machine_memory.h"

namespace moe::heap {
namespace {

uint64_t offset_in_page(const std::byte* address) {
  return reinterpret_cast<uintptr_t>(address) % system_page_bytes();
}

struct Mapping {
  uintptr_t start = 0;
  uintptr_t end = 0;
  std::string line;
  bool is_private_memory = false;
};

/// The next line of /proc/self/maps; false behind the last.
bool read_mapping(std::ifstream& maps, Mapping* mapping) {
  while (std::getline(maps, mapping->line)) {
    unsigned long start = 0;
    unsigned long end = 0;
    unsigned long inode = 0;
    char access[5] = {};
    if (std::sscanf(
            mapping->line.c_str(), "%lx-%lx %4s %*s %*s %lu", &start, &end, access, &inode) != 4)
      continue;
    mapping->start = start;
    mapping->end = end;
    mapping->is_private_memory =
        std::strncmp(access, "rw", 2) == 0 && access[3] == 'p' && inode == 0;
    return true;
  }
  return false;
}

}  // namespace

MemoryRange whole_pages(const MemoryRange& range) {
  const uint64_t page_bytes = system_page_bytes();
  const uint64_t lead_bytes = (page_bytes - offset_in_page(range.data)) % page_bytes;
  if (range.bytes < lead_bytes + page_bytes)
    return {range.data, 0};
  return {range.data + lead_bytes, (range.bytes - lead_bytes) / page_bytes * page_bytes};
}

void check_private_memory(const std::vector<MemoryRange>& pages) {
  std::ifstream maps("/proc/self/maps");
  Mapping mapping;
  for (const MemoryRange& range : pages) {
    auto at = reinterpret_cast<uintptr_t>(range.data);
    const uintptr_t end = at + range.bytes;
    while (at < end) {
      while (mapping.end <= at && read_mapping(maps, &mapping)) {
      }
      const bool is_mapped = mapping.start <= at && at < mapping.end;
      MOE_CHECK(is_mapped && mapping.is_private_memory,
                range.bytes,
                " bytes are not private, writable memory of this process alone: ",
                is_mapped ? mapping.line : "nothing is mapped there");
      at = mapping.end;
    }
  }
}

HeapPages::HeapPages(const MemoryRange& memory, std::shared_ptr<Window> window)
    : memory_(memory), pages_(whole_pages(memory)), window_(std::move(window)) {}

uint64_t HeapPages::heap_bytes(const MemoryRange& memory) {
  return round_up(offset_in_page(memory.data) + memory.bytes, system_page_bytes());
}

std::shared_ptr<HeapPages> HeapPages::share(const MemoryRange& memory,
                                            std::shared_ptr<Window> window) {
  MOE_CHECK(offset_in_page(window->data()) == 0 && window->bytes() == heap_bytes(memory),
            "shared pages need a window of ",
            heap_bytes(memory),
            " bytes on whole pages, got ",
            window->bytes());
  const std::shared_ptr<HeapPages> shared(new HeapPages(memory, std::move(window)));
  const MemoryRange& pages = shared->pages_;
  MOE_CHECK(pages.bytes > 0, memory.bytes, " bytes have no whole page to share");
  std::byte* const source = shared->place_of(pages.data);
  std::memcpy(source, pages.data, pages.bytes);
  // An old size of zero maps the pages of a shared mapping a second time.
  if (::mremap(source, 0, pages.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, pages.data) == MAP_FAILED)
    throw SystemError(concat("mremap of ", pages.bytes, " bytes of the heap failed"), errno);
  ::madvise(pages.data, pages.bytes, MADV_DONTFORK);
  map_pages(pages.data, pages.bytes);
  return shared;
}

void HeapPages::unshare() {
  if (origin_.is_forked_child())
    return;  // the memory is absent there
  const std::lock_guard lock(mutex_);
  if (!window_)
    return;
  MOE_CHECK(
      num_writers_ == 0, memory_.bytes, " bytes cannot be unshared while peers write to them");
  void* const copy =
      ::mmap(nullptr, pages_.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED)
    throw CapacityError(
        concat("cannot get ", pages_.bytes, " bytes of private memory: ", std::strerror(errno)),
        pages_.bytes,
        machine_available_bytes());
  std::memcpy(copy, pages_.data, pages_.bytes);
  if (::mremap(copy, pages_.bytes, pages_.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, pages_.data) ==
      MAP_FAILED) {
    const int error = errno;
    ::munmap(copy, pages_.bytes);
    throw SystemError(concat("mremap of ", pages_.bytes, " bytes of private memory failed"), error);
  }
  window_ = nullptr;
}

void HeapPages::abandon() {
  if (origin_.is_forked_child())
    return;
  const std::lock_guard lock(mutex_);
  if (window_)
    new std::shared_ptr<Window>(std::exchange(window_, nullptr));  // for good
}

std::byte* HeapPages::place_of(const std::byte* address) const {
  return window_->data() + offset_in_page(memory_.data) + (address - memory_.data);
}

std::byte* HeapPages::in_heap(const std::byte* address) const {
  const std::lock_guard lock(mutex_);
  return window_ ? place_of(address) : nullptr;
}

std::shared_ptr<Window> HeapPages::window() const {
  const std::lock_guard lock(mutex_);
  return window_;
}

/// Calls body(memory, its place in the heap, bytes) for what lies on no whole page.
template <typename Body>
void HeapPages::for_edges(Body&& body) const {
  body(memory_.data, place_of(memory_.data), static_cast<size_t>(pages_.data - memory_.data));
  body(pages_.end(), place_of(pages_.end()), static_cast<size_t>(memory_.end() - pages_.end()));
}

bool HeapPages::begin_writes() {
  const std::lock_guard lock(mutex_);
  if (!window_)
    return false;
  if (num_writers_++ == 0)
    for_edges([](const std::byte* memory, std::byte* place, size_t bytes) {
      sync::write_shared(place, memory, bytes);
    });
  return true;
}

void HeapPages::end_writes(bool is_failed) {
  const std::lock_guard lock(mutex_);
  --num_writers_;
  // Others may still write: what this one's peers wrote must not wait for them, who may fail.
  if (window_ && !is_failed)
    for_edges([](std::byte* memory, const std::byte* place, size_t bytes) {
      sync::read_shared(memory, place, bytes);
    });
}

}  // namespace moe::heap
