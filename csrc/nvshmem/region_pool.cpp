#include "nvshmem/region_pool.h"

#include <cstring>

#include "core/error.h"

namespace moe::nvshmem {
namespace {

/// One rank's word: wanted bytes, then a pair per region.
struct Said {
  int64_t wanted_bytes = 0;
  struct Region {
    int64_t bytes;
    int64_t is_free;
  };
  std::vector<Region> regions;

  static Said from_bytes(const std::string& bytes) {
    Said said;
    const size_t tail_bytes = bytes.size() - sizeof(int64_t);
    MOE_CHECK(bytes.size() >= sizeof(int64_t) && tail_bytes % sizeof(Region) == 0,
              "what a rank says of its regions cannot have ",
              bytes.size(),
              " bytes");
    std::memcpy(&said.wanted_bytes, bytes.data(), sizeof(int64_t));
    said.regions.resize(tail_bytes / sizeof(Region));
    if (tail_bytes > 0)
      std::memcpy(said.regions.data(), bytes.data() + sizeof(int64_t), tail_bytes);
    return said;
  }
};

}  // namespace

std::string RegionPool::describe(int64_t wanted_bytes) const {
  const std::lock_guard lock(mutex_);
  std::string text(reinterpret_cast<const char*>(&wanted_bytes), sizeof wanted_bytes);
  for (const Region& region : regions_) {
    const Said::Region said{region.bytes, region.is_free ? 1 : 0};
    text.append(reinterpret_cast<const char*>(&said), sizeof said);
  }
  return text;
}

int RegionPool::choose(const std::vector<std::string>& said) {
  const Said first = Said::from_bytes(said.at(0));
  std::vector<bool> is_free(first.regions.size(), true);
  for (size_t rank_idx = 0; rank_idx < said.size(); ++rank_idx) {
    const Said other = Said::from_bytes(said[rank_idx]);
    MOE_CHECK(other.wanted_bytes == first.wanted_bytes,
              "memory between nodes has the same size on every rank: rank 0 asks for ",
              first.wanted_bytes,
              " bytes, rank ",
              rank_idx,
              " for ",
              other.wanted_bytes);
    MOE_CHECK(other.regions.size() == first.regions.size(),
              "rank 0 has ",
              first.regions.size(),
              " regions between nodes, rank ",
              rank_idx,
              " has ",
              other.regions.size());
    for (size_t i = 0; i < is_free.size(); ++i)
      is_free[i] = is_free[i] && other.regions[i].is_free != 0;
  }
  int best = kNone;
  for (size_t i = 0; i < is_free.size(); ++i) {
    const int64_t bytes = first.regions[i].bytes;
    if (is_free[i] && bytes >= first.wanted_bytes &&
        (best == kNone || bytes < first.regions[static_cast<size_t>(best)].bytes))
      best = static_cast<int>(i);
  }
  return best;
}

std::byte* RegionPool::take(int region_idx) {
  const std::lock_guard lock(mutex_);
  Region& region = regions_.at(static_cast<size_t>(region_idx));
  region.is_free = false;
  return region.data;
}

int RegionPool::add(std::byte* data, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  regions_.push_back({data, bytes, false});
  return static_cast<int>(regions_.size()) - 1;
}

void RegionPool::give_back(int region_idx) {
  const std::lock_guard lock(mutex_);
  regions_.at(static_cast<size_t>(region_idx)).is_free = true;
}

int64_t RegionPool::bytes(int region_idx) const {
  const std::lock_guard lock(mutex_);
  return regions_.at(static_cast<size_t>(region_idx)).bytes;
}

int64_t RegionPool::total_bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const Region& region : regions_)
    total += region.bytes;
  return total;
}

}  // namespace moe::nvshmem
