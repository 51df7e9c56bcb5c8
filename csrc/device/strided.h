#pragma once

#include <cstdint>

#include "device/primitives.h"
#include "layout/strided.h"

// Places in strided tensors, whose shapes lie in memory that nobody writes.

namespace moe::device {

/// Place of a logical byte, and the number of adjacent bytes that its run has from there on.
struct StridedPlace {
  int64_t offset;
  int64_t run_left;
};

struct Division {
  int64_t quotient;
  int64_t remainder;
};

/// Neither is negative.
MOE_DEVICE_CALLED Division divide(int64_t value, int64_t divisor) {
  const auto whole = static_cast<uint64_t>(value);
  const auto part = static_cast<uint64_t>(divisor);
  // A division of narrow numbers takes a quarter of the instructions.
  if ((whole | part) >> 32 == 0) {
    const auto quotient = static_cast<uint32_t>(whole) / static_cast<uint32_t>(part);
    return {quotient, static_cast<uint32_t>(whole) - quotient * static_cast<uint32_t>(part)};
  }
  const uint64_t quotient = whole / part;
  return {static_cast<int64_t>(quotient), static_cast<int64_t>(whole - quotient * part)};
}

/// Example: runs of 10 bytes, sizes (4, 3), strides (200, 20). Byte 57 is byte 7 of run (1, 2): it
/// lies at 200 + 2 * 20 + 7, and its run has 3 bytes left.
MOE_DEVICE_CALLED StridedPlace place_at(const layout::StridedBytes* shape, int64_t at) {
  const int64_t run_bytes = load_constant(&shape->run_bytes);
  const Division in_run = divide(at, run_bytes);
  int64_t runs = in_run.quotient;
  StridedPlace place{in_run.remainder, run_bytes - in_run.remainder};
#pragma unroll 1
  for (int dim = load_constant(&shape->num_dims) - 1; dim >= 0; --dim) {
    const Division index = divide(runs, load_constant(&shape->sizes[dim]));
    runs = index.quotient;
    place.offset += index.remainder * load_constant(&shape->strides[dim]);
  }
  return place;
}

/// A walk of equal steps over a tensor of at most kMaxDims dimensions, without divisions: the step
/// is split into bytes within a run and an index per dimension, which are added with carry.
class StridedWalk {
 public:
  static constexpr int kMaxDims = 2;

  MOE_DEVICE StridedWalk(const layout::StridedBytes* shape, int64_t at, int64_t step)
      : run_bytes_(load_constant(&shape->run_bytes)) {
    const int num_dims = load_constant(&shape->num_dims);
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) {
      // Dimensions that the tensor does not have come last and are never left.
      const int dim = num_dims - 1 - i;
      sizes_[i] = dim >= 0 ? load_constant(&shape->sizes[dim]) : INT64_MAX;
      strides_[i] = dim >= 0 ? load_constant(&shape->strides[dim]) : 0;
    }
    split(at, &in_run_, index_);
    split(step, &step_in_run_, step_index_);
  }

  MOE_DEVICE int64_t offset() const {
    return in_run_ + index_[0] * strides_[0] + index_[1] * strides_[1];
  }

  MOE_DEVICE void advance() {
    in_run_ += step_in_run_;
    bool carry = in_run_ >= run_bytes_;
    in_run_ -= carry ? run_bytes_ : 0;
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) {
      index_[i] += step_index_[i] + (carry ? 1 : 0);
      carry = index_[i] >= sizes_[i];
      index_[i] -= carry ? sizes_[i] : 0;
    }
  }

 private:
  MOE_DEVICE void split(int64_t bytes, int64_t* in_run, int64_t* index) const {
    const Division runs = divide(bytes, run_bytes_);
    const Division inner = divide(runs.quotient, sizes_[0]);
    *in_run = runs.remainder;
    index[0] = inner.remainder;
    index[1] = inner.quotient;
  }

  int64_t run_bytes_;
  int64_t sizes_[kMaxDims];  ///< the innermost first
  int64_t strides_[kMaxDims];
  int64_t in_run_;
  int64_t index_[kMaxDims];
  int64_t step_in_run_;
  int64_t step_index_[kMaxDims];
};

}  // namespace moe::device
