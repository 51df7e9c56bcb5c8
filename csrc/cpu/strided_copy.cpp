#include "cpu/strided_copy.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace moe::cpu {

namespace {

using layout::StridedBytes;

/// A walk over the bytes of a place in logical order.
class Cursor {
 public:
  Cursor(const Place& place, int64_t at, int64_t end)
      : shape_(place.shape), data_(place.data), contiguous_left_(end - at) {
    if (shape_ == nullptr) {
      data_ += at;
      return;
    }
    int64_t run_idx = at / shape_->run_bytes;
    in_run_ = at % shape_->run_bytes;
    data_ += in_run_;
    for (int dim = shape_->num_dims - 1; dim >= 0; --dim) {
      index_[dim] = run_idx % shape_->sizes[dim];
      run_idx /= shape_->sizes[dim];
      data_ += index_[dim] * shape_->strides[dim];
    }
  }

  std::byte* data() const { return data_; }

  int64_t run_left() const {
    return shape_ == nullptr ? contiguous_left_ : shape_->run_bytes - in_run_;
  }

  /// How many units of @p unit bytes follow at one distance, which is stored in @p stride.
  int64_t units_left(int64_t unit, int64_t* stride) const {
    if (shape_ == nullptr || shape_->run_bytes != unit) {
      *stride = unit;
      return run_left() / unit;
    }
    const int inner = shape_->num_dims - 1;
    *stride = shape_->strides[inner];
    return shape_->sizes[inner] - index_[inner];
  }

  /// Moves on by @p bytes of the present run.
  void advance(int64_t bytes) {
    data_ += bytes;
    if (shape_ == nullptr) {
      contiguous_left_ -= bytes;
      return;
    }
    in_run_ += bytes;
    if (in_run_ < shape_->run_bytes)
      return;
    data_ -= in_run_;
    in_run_ = 0;
    step(1);
  }

  /// Moves on by @p count units as units_left() counts them.
  void advance_units(int64_t unit, int64_t count) {
    if (shape_ == nullptr || shape_->run_bytes != unit)
      advance(unit * count);
    else
      step(count);
  }

 private:
  /// Moves on by @p count runs of the innermost dimension, at most to its end.
  void step(int64_t count) {
    for (int dim = shape_->num_dims - 1; dim >= 0; --dim) {
      data_ += count * shape_->strides[dim];
      index_[dim] += count;
      if (index_[dim] < shape_->sizes[dim])
        return;
      data_ -= shape_->sizes[dim] * shape_->strides[dim];
      index_[dim] = 0;
      count = 1;
    }
  }

  const StridedBytes* shape_;
  std::byte* data_;
  int64_t contiguous_left_;
  int64_t in_run_ = 0;
  int64_t index_[StridedBytes::kMaxDims] = {};
};

template <int kBytes>
void copy_units(
    const std::byte* src, int64_t src_stride, std::byte* dst, int64_t dst_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(dst + i * dst_stride, src + i * src_stride, kBytes);
}

/// Units that are copied one by one, without a call for each.
using UnitCopy = void (*)(const std::byte*, int64_t, std::byte*, int64_t, int64_t);

UnitCopy unit_copy(int64_t bytes) {
  switch (bytes) {
    case 1:
      return copy_units<1>;
    case 2:
      return copy_units<2>;
    case 4:
      return copy_units<4>;
    case 8:
      return copy_units<8>;
    case 16:
      return copy_units<16>;
    case 32:
      return copy_units<32>;
    default:
      return nullptr;
  }
}

}  // namespace

void copy_strided(const RowKernels& kernels,
                  const Place& src,
                  int64_t src_from,
                  const Place& dst,
                  int64_t dst_from,
                  int64_t bytes,
                  StoreMode mode) {
  if (src.shape == nullptr && dst.shape == nullptr) {
    kernels.copy(src.data + src_from, dst.data + dst_from, bytes, mode);
    return;
  }
  Cursor from(src, src_from, src_from + bytes);
  Cursor to(dst, dst_from, dst_from + bytes);
  while (bytes > 0) {
    const int64_t adjacent = std::min({from.run_left(), to.run_left(), bytes});
    if (const UnitCopy copy = unit_copy(adjacent)) {
      int64_t src_stride = 0;
      int64_t dst_stride = 0;
      const int64_t count = std::min({from.units_left(adjacent, &src_stride),
                                      to.units_left(adjacent, &dst_stride),
                                      bytes / adjacent});
      copy(from.data(), src_stride, to.data(), dst_stride, count);
      from.advance_units(adjacent, count);
      to.advance_units(adjacent, count);
      bytes -= adjacent * count;
      continue;
    }
    kernels.copy(from.data(), to.data(), adjacent, mode);
    from.advance(adjacent);
    to.advance(adjacent);
    bytes -= adjacent;
  }
}

namespace {

constexpr int kLanes = 8;
constexpr int64_t kRoundBytes = 8 * kLanes;
constexpr int64_t kAheadBytes = 2048;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;

uint64_t absorb(uint64_t lane, uint64_t word) {
  lane = (lane ^ word) * kOdd;
  return lane ^ lane >> 29;
}

struct Lanes {
  uint64_t lane[kLanes];

  /// @param bytes  A multiple of kRoundBytes.
  /// @param next   Where the bytes that are taken afterwards lie, from @p data: they are fetched
  ///               ahead, as the processor cannot guess them.
  void take(const std::byte* data, int64_t bytes, int64_t next) {
    const int64_t ahead = std::min(kAheadBytes, bytes);
    Lanes now = *this;  // a copy that stays in registers
    const auto take_round = [&now](const std::byte* from) {
      for (int i = 0; i < kLanes; ++i) {
        uint64_t word = 0;
        std::memcpy(&word, from + 8 * i, sizeof(word));
        now.lane[i] = absorb(now.lane[i], word);
      }
    };
    int64_t at = 0;
    for (; at < bytes - ahead; at += kRoundBytes) {
      __builtin_prefetch(data + at + ahead);
      take_round(data + at);
    }
    for (; at < bytes; at += kRoundBytes) {
      __builtin_prefetch(data + (at + ahead - bytes) + next);
      take_round(data + at);
    }
    *this = now;
  }
};

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

}  // namespace

uint64_t checksum(const Place& place, int64_t bytes) {
  constexpr int64_t kStagedBytes = 64 * kRoundBytes;
  constexpr int64_t kLongRunBytes = 16 * kRoundBytes;
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i)
    lanes.lane[i] = absorb(kOdd, static_cast<uint64_t>(i));
  const bool is_read_in_place = place.shape == nullptr || place.shape->run_bytes >= kLongRunBytes;
  const int64_t staged_bytes = is_read_in_place ? kRoundBytes : kStagedBytes;
  const int64_t next = place.shape == nullptr || place.shape->is_contiguous()
                           ? bytes
                           : place.shape->strides[place.shape->num_dims - 1];
  alignas(64) std::byte staged[kStagedBytes];
  const RowKernels& kernels = best_row_kernels();
  for (int64_t at = 0; at < bytes;) {
    if (is_read_in_place) {
      const Cursor here(place, at, bytes);
      const int64_t adjacent = here.run_left() / kRoundBytes * kRoundBytes;
      if (adjacent > 0) {
        lanes.take(here.data(), adjacent, next);
        at += adjacent;
        continue;
      }
    }
    // Rounds that lie in several runs, and the end.
    const int64_t part = std::min(bytes - at, staged_bytes);
    const int64_t padded = (part + kRoundBytes - 1) / kRoundBytes * kRoundBytes;
    copy_strided(kernels, place, at, Place{staged, nullptr}, 0, part, StoreMode::kCached);
    std::memset(staged + part, 0, static_cast<size_t>(padded - part));
    lanes.take(staged, padded, padded);
    at += part;
  }
  auto sum = static_cast<uint64_t>(bytes);
  for (const uint64_t lane : lanes.lane)
    sum = absorb(sum, lane);
  return absorb(sum, 0);
}

}  // namespace moe::cpu
