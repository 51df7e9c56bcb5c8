#pragma once

#include <cstdint>

namespace moe::simt::checker {

/// Numbers that follow from the seed alone, on every machine (SplitMix64, Steele et al. 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0x1234567ull) {}

  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ull;
    uint64_t word = state_;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
  }
  /// In [0, bound); bound >= 1.
  uint32_t below(uint32_t bound) {
    return static_cast<uint32_t>(((next() >> 32) * uint64_t{bound}) >> 32);
  }
  int64_t between(int64_t first, int64_t last) {
    return first + below(static_cast<uint32_t>(last - first + 1));
  }
  /// True in @p num of @p total cases.
  bool chance(uint32_t num, uint32_t total) { return below(total) < num; }

 private:
  uint64_t state_;
};

}  // namespace moe::simt::checker
