#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/error.h"

namespace moe::heap {

/// Addresses of one rank's segments here. One writer at a time; readers take no lock, as
/// they run once per operation and peer.
///
/// Entries live in chunks that double in size and never move: chunk c holds 16 << c entries.
class SegmentTable {
 public:
  struct Entry {
    std::atomic<std::byte*> data{nullptr};
    uint64_t bytes = 0;  ///< valid once data is seen
  };

  SegmentTable() = default;
  SegmentTable(const SegmentTable&) = delete;
  SegmentTable& operator=(const SegmentTable&) = delete;
  ~SegmentTable() {
    for (std::atomic<Entry*>& chunk : chunks_)
      delete[] chunk.load(std::memory_order_relaxed);
  }

  /// The entry of a published segment, or null.
  const Entry* find(uint32_t segment_idx) const {
    const Place place = place_of(segment_idx);
    const Entry* chunk = chunks_[place.chunk_idx].load(std::memory_order_acquire);
    if (chunk == nullptr)
      return nullptr;
    const Entry* entry = chunk + place.entry_idx;
    return entry->data.load(std::memory_order_acquire) == nullptr ? nullptr : entry;
  }

  void publish(uint32_t segment_idx, std::byte* data, uint64_t bytes) {
    const Place place = place_of(segment_idx);
    Entry* chunk = chunks_[place.chunk_idx].load(std::memory_order_relaxed);
    if (chunk == nullptr) {
      chunk = new Entry[size_t{kFirstEntries} << place.chunk_idx];
      chunks_[place.chunk_idx].store(chunk, std::memory_order_release);
    }
    Entry& entry = chunk[place.entry_idx];
    MOE_CHECK(entry.data.load(std::memory_order_relaxed) == nullptr,
              "segment ",
              segment_idx,
              " is announced twice: it has ",
              entry.bytes,
              " bytes, now ",
              bytes);
    entry.bytes = bytes;
    entry.data.store(data, std::memory_order_release);
  }

 private:
  static constexpr uint32_t kFirstEntries = 16;
  static constexpr int kNumChunks = 29;  // all 2^32 indices

  struct Place {
    int chunk_idx;
    uint64_t entry_idx;
  };

  static Place place_of(uint32_t segment_idx) {
    const uint64_t scaled = uint64_t{segment_idx} / kFirstEntries + 1;
    const int chunk_idx = static_cast<int>(std::bit_width(scaled)) - 1;
    const uint64_t chunk_start = ((uint64_t{1} << chunk_idx) - 1) * kFirstEntries;
    return {chunk_idx, segment_idx - chunk_start};
  }

  std::array<std::atomic<Entry*>, kNumChunks> chunks_{};
};

}  // namespace moe::heap
