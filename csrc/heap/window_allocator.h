#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace moe::heap {

inline uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Free bytes of every segment: bookkeeping only, it never touches the memory.
///
/// Every byte of a segment belongs to exactly one block; blocks of a segment form a list in address
/// order, and free neighbors are merged at once. Free blocks also hang in bins by size (8 bins per
/// power of two), the most recently freed first. Allocation and freeing are O(1), except that
/// allocate() scans the one or two bins in which some blocks may be too small.
///
/// Not thread-safe.
class WindowAllocator {
 public:
  static constexpr uint64_t kPageBytes = 4096;
  static constexpr uint64_t kSmallBytes = 64;  ///< granularity and alignment below kPageBytes

  /// kQuarantined: freed, but peers may still write there. kHeld: taken by take_all_free().
  enum class BlockState : uint8_t { kFree, kLive, kQuarantined, kHeld };

  struct Block {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint32_t segment_idx = 0;
    BlockState state = BlockState::kFree;
    uint64_t quarantine_round = 0;  ///< round of the latest quarantine(); 0 for none
    Block* lower = nullptr;         ///< neighbor in address order, same segment
    Block* upper = nullptr;
    Block* previous = nullptr;  ///< in its bin or in the quarantine list
    Block* next = nullptr;      ///< there, or among the spare nodes
  };

  struct Counters {
    uint64_t free_bytes = 0;
    uint64_t live_bytes = 0;
    uint64_t quarantined_bytes = 0;
    uint64_t peak_live_bytes = 0;
    uint64_t num_live = 0;
    uint64_t num_allocations = 0;
  };

  /// Bytes that a request of @p bytes occupies: a multiple of 64 below 4096, of 4096 from there on.
  static uint64_t rounded_bytes(uint64_t bytes);

  WindowAllocator() = default;
  WindowAllocator(const WindowAllocator&) = delete;
  WindowAllocator& operator=(const WindowAllocator&) = delete;

  /// Adds bytes [@p offset, @p offset + @p bytes) of a new segment as one free block.
  void add_segment(uint32_t segment_idx, uint64_t bytes, uint64_t offset = 0);

  enum class End { kLower, kUpper };
  /// Adds @p bytes at one end of a segment, to what is free there.
  void extend(uint32_t segment_idx, uint64_t bytes, End end);
  /// By how much a segment has to be extended so that a window of rounded_bytes(@p bytes) can lie
  /// at that end.
  uint64_t missing_bytes(uint32_t segment_idx, uint64_t bytes, End end) const;

  /// @return A block of rounded_bytes(@p bytes), @p bytes > 0, or null when nothing fits.
  Block* allocate(uint64_t bytes);

  /// @return The largest block not above rounded_bytes(@p most_bytes) that can be had; null if
  /// none.
  Block* allocate_largest(uint64_t most_bytes);

  /// Bytes of the largest window that allocate() could give. Exact from 4096 bytes on.
  uint64_t largest_free_bytes() const;

  /// Frees a live block, or quarantines it if quarantine(block) was called since the last
  /// end_quarantine().
  void free(Block* block) noexcept;

  /// Gives the tail of a live block behind rounded_bytes(@p bytes) back.
  void shrink(Block* block, uint64_t bytes);

  /// Marks a live block to which peers may still write: once freed, it is not reused before
  /// end_quarantine().
  void quarantine(Block* block) noexcept { block->quarantine_round = quarantine_round_; }
  /// Frees the quarantined blocks, and clears the marks of live ones.
  void end_quarantine() noexcept;

  /// Takes out every free block, so that none can be allocated; put_back() returns each.
  std::vector<Block*> take_all_free();
  void put_back(Block* block) noexcept;

  const Counters& counters() const { return counters_; }

  /// One operation that may allocate needs at most kSpareNodes nodes. A caller that must not
  /// allocate memory under its own lock adds them beforehand; otherwise they are made when needed.
  static constexpr uint64_t kSpareNodes = 4;
  static constexpr uint64_t kNodesPerChunk = 64;
  using NodeChunk = std::unique_ptr<Block[]>;
  bool needs_nodes() const { return num_spare_nodes_ < kSpareNodes; }
  void add_nodes(NodeChunk chunk);

  /// Blocks of one segment in address order, for tests.
  std::vector<const Block*> blocks(uint32_t segment_idx) const;

 private:
  static constexpr int kNumBins = 8 * 40;  ///< 8 for each of 40 powers of two

  static int bin_of(uint64_t bytes);
  static bool fits(const Block& block, uint64_t rounded);
  static uint64_t usable_bytes(const Block& block);

  Block* find_fit(uint64_t rounded) const;
  Block* largest_block() const;
  int next_bin(int bin_idx) const;
  int previous_bin(int bin_idx) const;
  Block* take(Block* block, uint64_t rounded);
  void set_upper(Block* block, Block* upper) noexcept;
  Block* split(Block* block, uint64_t lower_bytes);
  void insert_free(Block* block) noexcept;
  void remove_free(Block* block) noexcept;
  void merge_and_insert(Block* block) noexcept;
  Block* take_node();
  void drop_node(Block* block) noexcept;

  std::array<Block*, kNumBins> bins_{};
  std::array<uint64_t, kNumBins / 64> occupied_{};  ///< one bit per bin
  Block* quarantined_ = nullptr;
  Block* spare_nodes_ = nullptr;
  uint64_t num_spare_nodes_ = 0;
  uint64_t quarantine_round_ = 1;
  std::vector<NodeChunk> chunks_;
  std::vector<Block*> lowest_;   ///< [num_segments], by address
  std::vector<Block*> highest_;  ///< [num_segments]
  Counters counters_;
};

}  // namespace moe::heap
