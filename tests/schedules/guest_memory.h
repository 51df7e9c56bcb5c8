#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace moe::simt::checker {

/// Owner of a region of memory, and those who may touch it.
enum class Ownership : uint8_t {
  kHeap,    ///< of one rank, reached by every rank of its node and every host
  kDevice,  ///< kernels of one rank, and its host between them
  kHost,    ///< page-locked: kernels and host of one rank
  kShared,  ///< threads of one block
};

struct Region {
  std::byte* begin = nullptr;  ///< as kernels hold it
  int64_t bytes = 0;
  Ownership ownership = Ownership::kHeap;
  int rank_idx = 0;
  int64_t block = -1;       ///< kShared: BlockKey of the block that owns it
  bool is_defined = false;  ///< may be read before anybody has written it
  std::string name;

  int64_t bytes_loaded = 0;
  int64_t bytes_stored = 0;
  int64_t bytes_loaded_across = 0;  ///< of these, by kernels on another device
  int64_t bytes_stored_across = 0;
};

/// Memory of all emulated ranks. The addresses that kernels hold have nothing mapped at them: an
/// access that does not go through memory.h faults. The bytes lie at a fixed distance.
///
/// Regions begin at multiples of 256 with at least 16 bytes between them that belong to none.
class GuestMemory {
 public:
  static constexpr int64_t kBytes = int64_t{64} << 20;
  static constexpr int64_t kGranuleBytes = 16;
  static constexpr int64_t kNumGranules = kBytes / kGranuleBytes;

  GuestMemory();
  ~GuestMemory();
  GuestMemory(const GuestMemory&) = delete;
  GuestMemory& operator=(const GuestMemory&) = delete;

  /// Forgets every region. Addresses of the next ones do not depend on what was before.
  void reset();

  /// @param fill  Byte that the memory begins with; a region that is not defined holds 0xA5.
  std::byte* allocate(int64_t bytes,
                      Ownership ownership,
                      int rank_idx,
                      const std::string& name,
                      bool is_defined,
                      int fill = 0);
  /// A block's shared memory; its bytes are poisoned, its place is used again.
  std::byte* allocate_shared(int64_t bytes, int rank_idx, int64_t block, const std::string& name);
  void release_shared(std::byte* address);

  /// Place of the bytes of @p address.
  std::byte* real(const void* address) const {
    return reinterpret_cast<std::byte*>(const_cast<void*>(address)) + distance_;
  }
  bool is_guest(const void* address) const {
    const auto place = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(guest_);
    return place < static_cast<uintptr_t>(kBytes);
  }
  int64_t granule(const void* address) const {
    return (reinterpret_cast<const std::byte*>(address) - guest_) / kGranuleBytes;
  }
  std::byte* address_of(int64_t granule_idx) const { return guest_ + granule_idx * kGranuleBytes; }

  /// The region that holds all of [@p address, + @p bytes), or null.
  Region* find(const void* address, int64_t bytes);
  /// "x of rank 1 + 48" for messages.
  std::string describe(const void* address);
  /// Granules that any region has taken since the last reset.
  int64_t num_used_granules() const { return top_ / kGranuleBytes; }

  /// From now on so many successive ranks share a node, whose heaps they reach.
  void set_nodes(int num_local_ranks) { num_local_ranks_ = num_local_ranks; }
  bool is_of_other_node(int rank_idx, int other_rank) const {
    return num_local_ranks_ > 0 && rank_idx / num_local_ranks_ != other_rank / num_local_ranks_;
  }
  /// From now on ranks take so many devices in turn.
  void set_devices(int num_devices) { num_devices_ = num_devices; }
  bool is_of_other_device(int rank_idx, int other_rank) const {
    return rank_idx % num_devices_ != other_rank % num_devices_;
  }
  /// Regions of the same size, one a rank, are symmetric: puts name a place in one by its place in
  /// another.
  void make_symmetric(std::vector<std::byte*> bases) { symmetric_.push_back(std::move(bases)); }
  /// Address on @p peer_rank that @p address of @p rank_idx stands for; null where it is not
  /// symmetric.
  std::byte* on_peer(const void* address, int64_t bytes, int rank_idx, int peer_rank);

  std::vector<Region>& regions() { return regions_; }
  /// Bytes of regions whose name begins with @p name.
  int64_t bytes_loaded(const std::string& name) const { return sum(name, &Region::bytes_loaded); }
  int64_t bytes_stored(const std::string& name) const { return sum(name, &Region::bytes_stored); }
  int64_t bytes_loaded_across(const std::string& name) const {
    return sum(name, &Region::bytes_loaded_across);
  }
  int64_t bytes_stored_across(const std::string& name) const {
    return sum(name, &Region::bytes_stored_across);
  }

 private:
  int64_t sum(const std::string& name, int64_t Region::* counted) const;
  std::byte* take(int64_t bytes);
  std::byte* enter(std::byte* address, Region region, int fill);

  std::byte* guest_ = nullptr;
  std::byte* real_ = nullptr;
  ptrdiff_t distance_ = 0;
  int64_t top_ = 0;
  std::vector<Region> regions_;      ///< [0] stands for none
  std::vector<uint16_t> region_of_;  ///< by granule
  int num_local_ranks_ = 0;          ///< 0: all ranks share a node
  int num_devices_ = 1;
  std::vector<std::vector<std::byte*>> symmetric_;
  std::multimap<int64_t, std::byte*> free_shared_;
};

}  // namespace moe::simt::checker
