#include "simt/shared_regions.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/math.h"
#include "heap/memfd_segment.h"
#include "heap/owned_fd.h"
#include "simt/nic.h"

namespace moe::simt {
namespace {

constexpr int64_t kPageBytes = 4096;

/// Place of a rank's file. The rest of the text is what is wrong; then there is none.
struct FilePlace {
  int64_t bytes = 0;
  int32_t process_id = 0;
  int32_t fd = -1;

  std::string to_bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
  static FilePlace from_bytes(const std::string& text) {
    FilePlace place;
    std::memcpy(&place, text.data(), sizeof place);
    return place;
  }
};

std::shared_ptr<heap::Segment> map_file(int rank_idx, const FilePlace& place) {
  const std::string path = concat("/proc/", place.process_id, "/fd/", place.fd);
  const heap::OwnedFd fd =
      heap::OwnedFd::open([&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC); });
  if (!fd)
    throw SystemError(concat("the emulated network card does not reach memory of rank ",
                             rank_idx,
                             " by ",
                             path,
                             ": ",
                             std::strerror(errno)),
                      errno);
  return heap::map_peer_segment(fd.get(), static_cast<uint64_t>(place.bytes));
}

/// Region as one rank has it: its own part, and everybody's as the card sees it.
struct Region {
  std::vector<std::shared_ptr<heap::Segment>> by_rank;
  std::byte* own = nullptr;

  ~Region() {
    if (own != nullptr)
      Nic::disconnect(own);
  }
};

class SharedRegions final : public runtime::SymmetricRegions {
 public:
  std::shared_ptr<std::byte> allocate(group::Group& group,
                                      int64_t bytes,
                                      const group::InterruptCheck& interrupt_check) override {
    MOE_CHECK(bytes > 0, "memory between nodes must have > 0 bytes, got ", bytes);
    heap::NewSegment made;
    FilePlace place;
    std::string problem;
    try {
      made = heap::create_segment(static_cast<uint64_t>(round_up(bytes, kPageBytes)), false);
      place = {bytes, static_cast<int32_t>(::getpid()), made.memfd.get()};
    } catch (const std::exception& error) {
      problem = error.what();
    }
    const auto said = group.all_gather(place.to_bytes() + problem, interrupt_check);
    check(group, said, bytes);
    auto region = std::make_shared<Region>();
    region->by_rank.resize(said.size());
    std::vector<std::byte*> addresses(said.size());
    for (int rank_idx = 0; rank_idx < group.num_ranks() && problem.empty(); ++rank_idx) {
      if (!group.is_active(rank_idx))
        continue;
      const auto idx = static_cast<size_t>(rank_idx);
      FilePlace peer = FilePlace::from_bytes(said[idx]);
      peer.bytes = round_up(peer.bytes, kPageBytes);
      try {
        region->by_rank[idx] =
            rank_idx == group.rank_idx() ? made.segment : map_file(rank_idx, peer);
        addresses[idx] = region->by_rank[idx]->data();
      } catch (const std::exception& error) {
        problem = error.what();
      }
    }
    // Once everybody has mapped them the descriptors are of no use.
    const auto outcomes = group.all_gather(FilePlace().to_bytes() + problem, interrupt_check);
    check(group, outcomes, 0);
    Nic::connect(made.segment->data(), bytes, std::move(addresses));
    region->own = made.segment->data();
    return {region, region->own};
  }

 private:
  /// Throws what is wrong on any rank, on every rank.
  static void check(const group::Group& group,
                    const std::vector<std::string>& said,
                    int64_t bytes) {
    for (int rank_idx = 0; rank_idx < group.num_ranks(); ++rank_idx) {
      if (!group.is_active(rank_idx))
        continue;
      const std::string& text = said[static_cast<size_t>(rank_idx)];
      MOE_CHECK(text.size() == sizeof(FilePlace),
                "rank ",
                rank_idx,
                " has no memory between nodes: ",
                text.substr(sizeof(FilePlace)));
      const int64_t other_bytes = FilePlace::from_bytes(text).bytes;
      MOE_CHECK(other_bytes == bytes,
                "memory between nodes has the same size on every rank: rank ",
                group.rank_idx(),
                " asks for ",
                bytes,
                " bytes, rank ",
                rank_idx,
                " for ",
                other_bytes);
    }
  }
};

}  // namespace

std::shared_ptr<runtime::SymmetricRegions> make_shared_regions() {
  return std::make_shared<SharedRegions>();
}

}  // namespace moe::simt
