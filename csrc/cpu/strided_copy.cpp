#include "cpu/strided_copy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "core/math.h"
#include "cpu/checksum_lanes.h"

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

  /// Number of units of @p unit bytes that follow at one distance, which is stored in @p stride.
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

/// Bytes between a run and the next.
int64_t run_gap(const Place& place) {
  if (place.shape == nullptr || place.shape->is_contiguous())
    return 0;
  return place.shape->strides[place.shape->num_dims - 1] - place.shape->run_bytes;
}

/// Bytes of the next run that are fetched while one is copied, as the processor cannot guess where
/// it begins. More of them only delay what is copied.
constexpr int64_t kFetchedBytes = 1024;

void fetch(const std::byte* begin, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(begin + at);
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
  const int64_t gap = run_gap(src);
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
    if (gap != 0 && adjacent == from.run_left())
      fetch(from.data() + adjacent + gap, std::min(src.shape->run_bytes, kFetchedBytes));
    kernels.copy(from.data(), to.data(), adjacent, mode);
    from.advance(adjacent);
    to.advance(adjacent);
    bytes -= adjacent;
  }
}

namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

/// Runs from so many bytes on are hashed where they lie, shorter ones in so large a copy.
constexpr int64_t kLongRunBytes = 4 * kChecksumRoundBytes;
constexpr int64_t kStagedBytes = 16 * kChecksumRoundBytes;

bool has_long_runs(const Place& place) {
  return place.shape == nullptr || place.shape->run_bytes >= kLongRunBytes;
}

int64_t whole_rounds(int64_t bytes) {
  return bytes & -kChecksumRoundBytes;
}

/// Lanes as a block begins.
alignas(64) constexpr auto kFirstLanes = [] {
  std::array<uint64_t, kChecksumLanes> lanes{};
  for (int i = 0; i < kChecksumLanes; ++i)
    lanes[static_cast<size_t>(i)] = absorb(kChecksumOdd, static_cast<uint64_t>(i));
  return lanes;
}();

uint64_t hash_of_lanes(uint64_t* lanes, int64_t block_idx) {
  constexpr int kLast = 8;
  // A lane that took another as it is could not tell a change of the one from a change of the
  // other.
  for (int i = kLast; i < kChecksumLanes; ++i)
    lanes[i] = absorb(absorb(lanes[i - kLast], uint64_t{0}), lanes[i]);
  uint64_t hash = absorb(kChecksumOdd, static_cast<uint64_t>(block_idx));
  for (int i = kChecksumLanes - kLast; i < kChecksumLanes; ++i)
    hash = absorb(hash, lanes[i]);
  return absorb(hash, uint64_t{0});
}

/// Hashes the block of @p src that begins at @p at, and copies its first @p copied_bytes.
uint64_t copy_block(const RowKernels& kernels,
                    const Place& src,
                    int64_t src_bytes,
                    int64_t at,
                    const Place& dst,
                    int64_t dst_at,
                    int64_t copied_bytes,
                    StoreMode mode) {
  const int64_t block_bytes = std::min(kChecksumBlockBytes, src_bytes - at);
  const bool is_read_in_place = has_long_runs(src);
  const bool is_written_in_place = has_long_runs(dst);
  alignas(64) uint64_t lanes[kChecksumLanes];
  const uint64_t* before = kFirstLanes.data();
  alignas(64) std::byte staged[kStagedBytes];
  int64_t done = 0;
  const auto copy_from_done = [&](int64_t bytes) {
    if (bytes > 0)
      copy_strided(kernels, src, at + done, dst, dst_at + done, bytes, mode);
  };
  Cursor from(src, at, src_bytes);
  while (done < block_bytes) {
    const int64_t left = block_bytes - done;
    const int64_t to_copy = std::clamp<int64_t>(copied_bytes - done, 0, left);
    int64_t part = is_read_in_place ? whole_rounds(std::min(from.run_left(), left)) : 0;
    if (part == 0) {
      // Rounds that lie in several runs, and the end.
      part = std::min(left, is_read_in_place ? kChecksumRoundBytes : kStagedBytes);
      if (is_read_in_place) {
        for (int64_t staged_bytes = 0; staged_bytes < part;) {
          const int64_t piece = std::min(from.run_left(), part - staged_bytes);
          std::memcpy(staged + staged_bytes, from.data(), static_cast<size_t>(piece));
          from.advance(piece);
          staged_bytes += piece;
        }
      } else {
        copy_strided(kernels, src, at + done, Place{staged, nullptr}, 0, part, StoreMode::kCached);
      }
      const int64_t padded = whole_rounds(part + kChecksumRoundBytes - 1);
      std::memset(staged + part, 0, static_cast<size_t>(padded - part));
      const std::byte* const next = is_read_in_place ? from.data() : staged;
      kernels.absorb_copy(staged, nullptr, padded, StoreMode::kCached, next, before, lanes);
      before = lanes;
      copy_from_done(std::min(part, to_copy));
      done += part;
      continue;
    }
    std::byte* passed_to = nullptr;
    if (to_copy > 0 && is_written_in_place) {
      const Cursor to(dst, dst_at + done, dst_at + copied_bytes);
      if (const int64_t both = whole_rounds(std::min({part, to_copy, to.run_left()})); both > 0) {
        part = both;
        passed_to = to.data();
      } else {
        part = kChecksumRoundBytes;
      }
    }
    const bool ends_run = from.run_left() - part < kChecksumRoundBytes;
    const int64_t next = ends_run ? from.run_left() + run_gap(src) : part;
    kernels.absorb_copy(from.data(), passed_to, part, mode, from.data() + next, before, lanes);
    before = lanes;
    if (passed_to == nullptr)
      copy_from_done(std::min(part, to_copy));
    from.advance(part);
    done += part;
  }
  return hash_of_lanes(lanes, at / kChecksumBlockBytes);
}

}  // namespace

uint64_t copy_with_checksum(const RowKernels& kernels,
                            const Place& src,
                            int64_t src_bytes,
                            int64_t src_from,
                            const Place& dst,
                            int64_t dst_from,
                            int64_t bytes,
                            StoreMode mode) {
  const int64_t end = src_from + bytes;
  const int64_t first = std::min(end, round_up(src_from, kChecksumBlockBytes));
  const bool is_copied = dst.data != nullptr;
  if (is_copied)
    copy_strided(kernels, src, src_from, dst, dst_from, first - src_from, mode);
  uint64_t blocks = 0;
  for (int64_t at = first; at < end; at += kChecksumBlockBytes) {
    const int64_t copied_bytes = is_copied ? std::min(kChecksumBlockBytes, end - at) : 0;
    blocks += copy_block(
        kernels, src, src_bytes, at, dst, dst_from + (at - src_from), copied_bytes, mode);
  }
  return blocks;
}

uint64_t finish_checksum(uint64_t blocks, int64_t bytes) {
  return absorb(absorb(blocks, static_cast<uint64_t>(bytes)), uint64_t{0});
}

uint64_t checksum(const Place& place, int64_t bytes) {
  const uint64_t blocks = copy_with_checksum(
      best_row_kernels(), place, bytes, 0, Place{}, 0, bytes, StoreMode::kCached);
  return finish_checksum(blocks, bytes);
}

}  // namespace moe::cpu
