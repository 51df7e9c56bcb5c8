#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

namespace moe::heap {

/// Disjoint ranges of bytes, [start, end) each; ranges that touch are one.
class RangeSet {
 public:
  struct Range {
    uint64_t start;
    uint64_t end;
    uint64_t bytes() const { return end - start; }
  };

  /// @return Bytes of [start, end) that were not in the set before.
  uint64_t insert(uint64_t start, uint64_t end) {
    if (start >= end)
      return 0;
    uint64_t known_bytes = 0;
    for (const Range& range : overlapping(start, end))
      known_bytes += range.bytes();
    const uint64_t new_bytes = end - start - known_bytes;
    auto entry = first_reaching(start);
    while (entry != ends_.end() && entry->first <= end) {
      start = std::min(start, entry->first);
      end = std::max(end, entry->second);
      entry = ends_.erase(entry);
    }
    ends_[start] = end;
    return new_bytes;
  }

  void erase(uint64_t start, uint64_t end) {
    auto entry = first_reaching(start);
    while (entry != ends_.end() && entry->first < end) {
      const Range range{entry->first, entry->second};
      entry = ends_.erase(entry);
      if (range.start < start)
        ends_[range.start] = std::min(range.end, start);
      if (range.end > end)
        ends_[end] = range.end;
    }
  }

  /// The parts of the set inside [start, end), in order.
  std::vector<Range> overlapping(uint64_t start, uint64_t end) const {
    std::vector<Range> found;
    auto entry = ends_.upper_bound(start);
    if (entry != ends_.begin())
      --entry;
    for (; entry != ends_.end() && entry->first < end; ++entry) {
      const Range part{std::max(start, entry->first), std::min(end, entry->second)};
      if (part.start < part.end)
        found.push_back(part);
    }
    return found;
  }

 private:
  /// First range whose end is not below @p start.
  std::map<uint64_t, uint64_t>::iterator first_reaching(uint64_t start) {
    auto entry = ends_.upper_bound(start);
    if (entry != ends_.begin() && std::prev(entry)->second >= start)
      --entry;
    return entry;
  }

  std::map<uint64_t, uint64_t> ends_;  ///< start -> end
};

}  // namespace moe::heap
