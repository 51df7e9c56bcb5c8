#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace moe::nvshmem {

/// Regions that every rank has alike, in the order they were made. Ranks give theirs back when they
/// like, so one is free for everybody only where all say so.
///
/// Thread-safe.
class RegionPool {
 public:
  static constexpr int kNone = -1;

  /// Words of this rank before an allocation: bytes wanted, and regions that are free here.
  std::string describe(int64_t wanted_bytes) const;

  /// The region that every rank takes, or kNone where all have to make one.
  /// @param said  Text that describe() gave on each rank, by rank.
  /// @throws InvalidArgument  ranks want different numbers of bytes, or have made different
  ///   regions.
  static int choose(const std::vector<std::string>& said);

  std::byte* take(int region_idx);
  /// Adds the next region, which is taken. @return its index.
  int add(std::byte* data, int64_t bytes);
  void give_back(int region_idx);
  int64_t bytes(int region_idx) const;
  /// Over all regions.
  int64_t total_bytes() const;

 private:
  struct Region {
    std::byte* data;
    int64_t bytes;
    bool is_free;
  };
  mutable std::mutex mutex_;
  std::vector<Region> regions_;
};

}  // namespace moe::nvshmem
