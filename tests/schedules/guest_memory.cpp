#include "schedules/guest_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/math.h"

namespace moe::simt::checker {

namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kRedZone = 16;
constexpr int kPoison = 0xA5;

std::byte* map(int64_t bytes, int protection) {
  void* const memory = mmap(nullptr,
                            static_cast<size_t>(bytes),
                            protection,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                            -1,
                            0);
  if (memory == MAP_FAILED)
    throw SystemError("cannot reserve memory for emulated ranks", errno);
  return static_cast<std::byte*>(memory);
}

}  // namespace

GuestMemory::GuestMemory()
    : guest_(map(kBytes, PROT_NONE)),
      real_(map(kBytes, PROT_READ | PROT_WRITE)),
      distance_(real_ - guest_),
      region_of_(static_cast<size_t>(kNumGranules)) {
  reset();
}

GuestMemory::~GuestMemory() {
  munmap(guest_, static_cast<size_t>(kBytes));
  munmap(real_, static_cast<size_t>(kBytes));
}

void GuestMemory::reset() {
  std::fill_n(region_of_.begin(), num_used_granules(), uint16_t{0});
  regions_.assign(1, Region{});
  free_shared_.clear();
  num_local_ranks_ = 0;
  num_devices_ = 1;
  symmetric_.clear();
  top_ = kAlignment;
}

std::byte* GuestMemory::take(int64_t bytes) {
  const int64_t begin = top_;
  const int64_t end = round_up(begin + bytes + kRedZone, kAlignment);
  if (end > kBytes)
    throw std::length_error(concat("emulated ranks have ",
                                   kBytes,
                                   " bytes of memory, ",
                                   end,
                                   " are needed: the case is too large for this program"));
  top_ = end;
  return guest_ + begin;
}

std::byte* GuestMemory::enter(std::byte* address, Region region, int fill) {
  region.begin = address;
  const auto region_idx = static_cast<uint16_t>(regions_.size());
  if (regions_.size() >= std::numeric_limits<uint16_t>::max())
    throw std::length_error("more regions than the emulator numbers");
  std::memset(real(address), region.is_defined ? fill : kPoison, static_cast<size_t>(region.bytes));
  std::fill_n(region_of_.begin() + granule(address),
              (region.bytes + kGranuleBytes - 1) / kGranuleBytes,
              region_idx);
  regions_.push_back(std::move(region));
  return address;
}

std::byte* GuestMemory::allocate(int64_t bytes,
                                 Ownership ownership,
                                 int rank_idx,
                                 const std::string& name,
                                 bool is_defined,
                                 int fill) {
  Region region;
  region.bytes = bytes;
  region.ownership = ownership;
  region.rank_idx = rank_idx;
  region.is_defined = is_defined;
  region.name = name;
  return enter(take(bytes), std::move(region), fill);
}

std::byte* GuestMemory::allocate_shared(int64_t bytes,
                                        int rank_idx,
                                        int64_t block,
                                        const std::string& name) {
  Region region;
  region.bytes = bytes;
  region.ownership = Ownership::kShared;
  region.rank_idx = rank_idx;
  region.block = block;
  region.name = name;
  const auto found = free_shared_.find(bytes);
  if (found == free_shared_.end())
    return enter(take(bytes), std::move(region), 0);
  std::byte* const address = found->second;
  free_shared_.erase(found);
  return enter(address, std::move(region), 0);
}

void GuestMemory::release_shared(std::byte* address) {
  const uint16_t region_idx = region_of_[static_cast<size_t>(granule(address))];
  const int64_t bytes = regions_[region_idx].bytes;
  std::fill_n(region_of_.begin() + granule(address),
              (bytes + kGranuleBytes - 1) / kGranuleBytes,
              uint16_t{0});
  free_shared_.emplace(bytes, address);
}

std::byte* GuestMemory::on_peer(const void* address, int64_t bytes, int rank_idx, int peer_rank) {
  const Region* const region = find(address, bytes);
  if (region == nullptr || region->rank_idx != rank_idx)
    return nullptr;
  for (const auto& bases : symmetric_)
    if (peer_rank >= 0 && static_cast<size_t>(peer_rank) < bases.size() &&
        bases[static_cast<size_t>(rank_idx)] == region->begin)
      return bases[static_cast<size_t>(peer_rank)] +
             (static_cast<const std::byte*>(address) - region->begin);
  return nullptr;
}

Region* GuestMemory::find(const void* address, int64_t bytes) {
  if (!is_guest(address))
    return nullptr;
  Region& region = regions_[region_of_[static_cast<size_t>(granule(address))]];
  const int64_t offset = static_cast<const std::byte*>(address) - region.begin;
  if (region.begin == nullptr || offset < 0 || offset + bytes > region.bytes)
    return nullptr;
  return &region;
}

std::string GuestMemory::describe(const void* address) {
  if (!is_guest(address))
    return concat("address ", address, ", which belongs to no emulated memory");
  const auto* const place = static_cast<const std::byte*>(address);
  const Region* nearest = nullptr;
  for (size_t i = 1; i < regions_.size(); ++i) {
    const Region& region = regions_[i];
    if (region.begin <= place && (nearest == nullptr || region.begin >= nearest->begin))
      nearest = &region;
  }
  if (nearest == nullptr)
    return "an address before every region";
  const int64_t offset = place - nearest->begin;
  return concat(nearest->name,
                " of rank ",
                nearest->rank_idx,
                " + ",
                offset,
                offset >= nearest->bytes ? concat(" (which has ", nearest->bytes, " bytes)") : "");
}

int64_t GuestMemory::sum(const std::string& name, int64_t Region::* counted) const {
  int64_t total = 0;
  for (const Region& region : regions_)
    if (region.name.starts_with(name))
      total += region.*counted;
  return total;
}

}  // namespace moe::simt::checker
