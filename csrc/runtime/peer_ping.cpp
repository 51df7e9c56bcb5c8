#include "runtime/peer_ping.h"

#include <cstring>

#include "core/error.h"
#include "runtime/polling.h"

namespace moe::runtime {
namespace {

constexpr int64_t kPlaceBytes = 64;  ///< bytes of the row of a rank in every area
static_assert(kPlaceBytes <= static_cast<int64_t>(sizeof(layout::Row)));

/// Never zero, and another one for each pair of ranks.
uint64_t word_of(int from_rank, int to_rank) {
  return (uint64_t{0xa5} << 56) + (static_cast<uint64_t>(from_rank + 1) << 24) +
         static_cast<uint64_t>(to_rank + 1);
}

/// The first word of a place that is not @p expected; else @p expected.
uint64_t find_other(const std::byte* place, uint64_t expected) {
  for (int64_t i = 0; i < kPlaceBytes; i += static_cast<int64_t>(sizeof(uint64_t))) {
    uint64_t word = 0;
    std::memcpy(&word, place + i, sizeof word);
    if (word != expected)
      return word;
  }
  return expected;
}

}  // namespace

/// An address that a GPU was given for another's memory may lead elsewhere, without an error. So
/// every rank writes where its first row will be in the areas of all, and reads.
std::string ping_peers(group::Group& group,
                       Device& device,
                       Stream& stream,
                       const ControlMemory& control,
                       const group::InterruptCheck& interrupt_check) {
  const int own_rank = group.rank_idx();
  const std::vector<std::byte*>& areas = control.areas();
  const int64_t bytes = group.num_ranks() * kPlaceBytes;
  const auto memory = device.allocate_host(3 * bytes);
  std::byte* const sent = memory.get();
  std::byte* const came = sent + bytes;
  std::byte* const read = came + bytes;
  const auto place_of = [](std::byte* places, int rank_idx) {
    return places + rank_idx * kPlaceBytes;
  };
  const auto row_of = [buffer = control.buffer()](std::byte* area, int rank_idx) {
    return reinterpret_cast<std::byte*>(&buffer.workspace(area).row(1, rank_idx));
  };
  const auto is_pinged = [&](int rank_idx) {
    return rank_idx == own_rank || control.is_elsewhere()[static_cast<size_t>(rank_idx)] != 0;
  };
  for (int peer_rank = 0; peer_rank < group.num_ranks(); ++peer_rank) {
    if (!is_pinged(peer_rank))
      continue;
    const uint64_t word = word_of(own_rank, peer_rank);
    for (int64_t i = 0; i < kPlaceBytes; i += static_cast<int64_t>(sizeof word))
      std::memcpy(place_of(sent, peer_rank) + i, &word, sizeof word);
    stream.copy(row_of(areas[static_cast<size_t>(peer_rank)], own_rank),
                place_of(sent, peer_rank),
                kPlaceBytes);
  }
  await(*stream.record());
  group.all_gather({}, interrupt_check);  // all have written
  for (int peer_rank = 0; peer_rank < group.num_ranks(); ++peer_rank) {
    if (!is_pinged(peer_rank))
      continue;
    stream.copy(place_of(came, peer_rank), row_of(control.area(), peer_rank), kPlaceBytes);
    stream.copy(place_of(read, peer_rank),
                row_of(areas[static_cast<size_t>(peer_rank)], peer_rank),
                kPlaceBytes);
  }
  await(*stream.record());
  group.all_gather({}, interrupt_check);  // all have read
  for (int peer_rank = 0; peer_rank < group.num_ranks(); ++peer_rank) {
    if (!is_pinged(peer_rank))
      continue;
    const uint64_t written = word_of(peer_rank, own_rank);
    const uint64_t kept = word_of(peer_rank, peer_rank);
    const uint64_t found = find_other(place_of(came, peer_rank), written);
    const uint64_t seen = find_other(place_of(read, peer_rank), kept);
    if (found == written && seen == kept)
      continue;
    return concat("rank ",
                  own_rank,
                  found != written ? " finds " : " reads ",
                  found != written ? found : seen,
                  found != written ? " in its memory where rank " : " from memory where rank ",
                  peer_rank,
                  " wrote ",
                  found != written ? written : kept,
                  ": peer-to-peer access (P2P) between their GPUs delivers wrong data, as it may "
                  "where an IOMMU or ACS of a PCIe switch redirects it; backend=\"host\" needs "
                  "none and moves rows through the host's memory");
  }
  return {};
}

}  // namespace moe::runtime
