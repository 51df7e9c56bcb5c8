#include "kernels/strided_copy.h"

#include "core/host_device.h"
#include "device/strided.h"
#include "device/warp.h"
#include "kernels/staged_copies.h"

namespace moe::kernels {

namespace {

using device::Bytes16;
using layout::StridedBytes;

/// From this many adjacent bytes on, runs are copied one after another. Shorter runs are shared out
/// over the lanes, so that many of them are under way at once.
constexpr int64_t kLongRunBytes = 2048;
/// The same where a unit that fits all runs is narrow, but each run for itself has wider ones.
constexpr int64_t kLongUnalignedRunBytes = 256;
/// Units of a lane under way together.
constexpr int kUnitsAtOnce = 4;

/// Piece that a warp moves at a time.
struct Piece {
  const StridedCopy* copy;
  const std::byte* source;
  std::byte* target;
  int64_t begin;  ///< logical bytes
  int64_t end;
};

MOE_DEVICE Piece find_piece(const StridedCopiesParams& params, int64_t piece_idx) {
  // The last copy that begins at or before the piece; those without bytes come before it.
  int64_t low = 0;
  int64_t high = params.num_copies;
#pragma unroll 1
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (device::load_constant(params.first_piece + middle) <= piece_idx)
      low = middle;
    else
      high = middle;
  }
  Piece piece{};
  piece.copy = params.copies + low;
  piece.source = device::load_constant(&piece.copy->source);
  piece.target = device::load_constant(&piece.copy->target);
  piece.begin = (piece_idx - device::load_constant(params.first_piece + low)) * params.piece_bytes;
  const int64_t bytes = device::load_constant(&piece.copy->source_shape.bytes);
  piece.end = bytes - piece.begin < params.piece_bytes ? bytes : piece.begin + params.piece_bytes;
  return piece;
}

/// All of whose bits that are 0 at the low end are 0 in every address of the place.
MOE_DEVICE uint64_t alignment_bits(const std::byte* base, const StridedBytes* shape) {
  uint64_t bits = reinterpret_cast<uint64_t>(base) |
                  static_cast<uint64_t>(device::load_constant(&shape->run_bytes));
  const int num_dims = device::load_constant(&shape->num_dims);
#pragma unroll 1
  for (int dim = 0; dim < num_dims; ++dim)
    bits |= static_cast<uint64_t>(device::load_constant(&shape->strides[dim]));
  return bits;
}

/// The largest power of two, at most 16, that divides @p bits.
MOE_DEVICE int widest_unit(uint64_t bits) {
  bits |= sizeof(Bytes16);
  return static_cast<int>(bits & (~bits + 1));
}

/// Lanes copy adjacent bytes, whose addresses are equally far from a multiple of a Unit.
template <typename Unit>
MOE_DEVICE_CALLED void copy_adjacent(const std::byte* source, std::byte* target, int64_t bytes) {
  constexpr auto kUnitBytes = static_cast<int64_t>(sizeof(Unit));
  const auto copy_bytes = [&](int64_t first, int64_t num_bytes) {
    if (device::lane_idx() < num_bytes)
      device::store(target + first + device::lane_idx(),
                    device::load(source + first + device::lane_idx()));
  };
  const auto to_unit = static_cast<int64_t>(-reinterpret_cast<uint64_t>(target) & (kUnitBytes - 1));
  const int64_t head = to_unit < bytes ? to_unit : bytes;
  const int64_t num_units = (bytes - head) / kUnitBytes;
  copy_bytes(0, head);
  const auto* const from = reinterpret_cast<const Unit*>(source + head);
  auto* const to = reinterpret_cast<Unit*>(target + head);
#pragma unroll 1
  for (int64_t first = device::lane_idx(); first < num_units;
       first += kUnitsAtOnce * device::kWarpSize) {
    Unit units[kUnitsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i)
      if (first + i * device::kWarpSize < num_units)
        units[i] = device::load(from + first + i * device::kWarpSize);
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i)
      if (first + i * device::kWarpSize < num_units)
        device::store(to + first + i * device::kWarpSize, units[i]);
  }
  const int64_t tail = head + num_units * kUnitBytes;
  copy_bytes(tail, bytes - tail);
}

MOE_DEVICE void copy_adjacent(const std::byte* source, std::byte* target, int64_t bytes) {
  switch (widest_unit(reinterpret_cast<uint64_t>(source) ^ reinterpret_cast<uint64_t>(target))) {
    case 16:
      return copy_adjacent<Bytes16>(source, target, bytes);
    case 8:
      return copy_adjacent<uint64_t>(source, target, bytes);
    case 4:
      return copy_adjacent<uint32_t>(source, target, bytes);
    case 2:
      return copy_adjacent<uint16_t>(source, target, bytes);
    default:
      return copy_adjacent<uint8_t>(source, target, bytes);
  }
}

/// Copies run by run: aligned middles by bulk copy if @p staged is given, the rest by all lanes.
MOE_DEVICE void copy_runs(const Piece& piece, StagedCopies* staged) {
  device::StridedPlace from{};
  device::StridedPlace to{};
#pragma unroll 1
  for (int64_t at = piece.begin; at < piece.end;) {
    if (from.run_left == 0)
      from = device::place_at(&piece.copy->source_shape, at);
    if (to.run_left == 0)
      to = device::place_at(&piece.copy->target_shape, at);
    int64_t bytes = from.run_left < to.run_left ? from.run_left : to.run_left;
    bytes = bytes < piece.end - at ? bytes : piece.end - at;
    const std::byte* const source = piece.source + from.offset;
    std::byte* const target = piece.target + to.offset;
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uint64_t>(source) % 16);
    const auto target_misaligned = static_cast<int64_t>(reinterpret_cast<uint64_t>(target) % 16);
    if (staged == nullptr || misaligned != target_misaligned) {
      copy_adjacent(source, target, bytes);
    } else if (misaligned != 0 || bytes < 16) {
      bytes = bytes < 16 - misaligned ? bytes : 16 - misaligned;
      copy_adjacent<uint8_t>(source, target, bytes);
    } else {
      bytes = bytes < StagedCopies::kStageBytes ? bytes / 16 * 16 : StagedCopies::kStageBytes;
      staged->push(source, target, bytes);
    }
    at += bytes;
    from.offset += bytes;
    from.run_left -= bytes;
    to.offset += bytes;
    to.run_left -= bytes;
  }
  if (staged != nullptr)
    staged->store_all();
}

/// The places of a lane's units, one after another, where a walk has too few dimensions.
class DividedWalk {
 public:
  MOE_DEVICE DividedWalk(const StridedBytes* shape, int64_t at, int64_t step)
      : shape_(shape), at_(at), step_(step) {}
  MOE_DEVICE int64_t offset() const { return device::place_at(shape_, at_).offset; }
  MOE_DEVICE void advance() { at_ += step_; }

 private:
  const StridedBytes* shape_;
  int64_t at_;
  int64_t step_;
};

/// Copies unit by unit, lanes next to each other; a unit never crosses the end of a run.
template <typename Unit, typename Walk>
MOE_DEVICE void copy_units(const Piece& piece) {
  constexpr auto kUnitBytes = static_cast<int64_t>(sizeof(Unit));
  constexpr int64_t kStepBytes = kUnitBytes * device::kWarpSize;
  int64_t at = piece.begin + device::lane_idx() * kUnitBytes;
  Walk from(&piece.copy->source_shape, at, kStepBytes);
  Walk to(&piece.copy->target_shape, at, kStepBytes);
#pragma unroll 1
  for (; at < piece.end; at += kUnitsAtOnce * kStepBytes) {
    Unit units[kUnitsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i)
      if (at + i * kStepBytes < piece.end) {
        units[i] = device::load(reinterpret_cast<const Unit*>(piece.source + from.offset()));
        from.advance();
      }
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i)
      if (at + i * kStepBytes < piece.end) {
        device::store(reinterpret_cast<Unit*>(piece.target + to.offset()), units[i]);
        to.advance();
      }
  }
}

template <typename Walk>
MOE_DEVICE_CALLED void copy_units(Piece piece, int unit_bytes) {
  switch (unit_bytes) {
    case 16:
      return copy_units<Bytes16, Walk>(piece);
    case 8:
      return copy_units<uint64_t, Walk>(piece);
    case 4:
      return copy_units<uint32_t, Walk>(piece);
    case 2:
      return copy_units<uint16_t, Walk>(piece);
    default:
      return copy_units<uint8_t, Walk>(piece);
  }
}

MOE_DEVICE void copy_piece(const Piece& piece, StagedCopies* staged) {
  const StridedBytes* const source_shape = &piece.copy->source_shape;
  const StridedBytes* const target_shape = &piece.copy->target_shape;
  const int unit_bytes = widest_unit(alignment_bits(piece.source, source_shape) |
                                     alignment_bits(piece.target, target_shape));
  const int64_t source_run = device::load_constant(&source_shape->run_bytes);
  const int64_t target_run = device::load_constant(&target_shape->run_bytes);
  const int64_t run_bytes = source_run < target_run ? source_run : target_run;
  if (run_bytes >= kLongRunBytes || (run_bytes >= kLongUnalignedRunBytes && unit_bytes < 16)) {
    copy_runs(piece, staged);
    return;
  }
  const int source_dims = device::load_constant(&source_shape->num_dims);
  const int target_dims = device::load_constant(&target_shape->num_dims);
  if ((source_dims > target_dims ? source_dims : target_dims) <= device::StridedWalk::kMaxDims)
    copy_units<device::StridedWalk>(piece, unit_bytes);
  else
    copy_units<DividedWalk>(piece, unit_bytes);
}

MOE_DEVICE void copy_pieces(const StridedCopiesParams& params, StagedCopies* staged) {
  const int64_t num_pieces = device::load_constant(params.first_piece + params.num_copies);
  const int64_t num_warps = static_cast<int64_t>(device::num_blocks()) * device::num_warps();
#pragma unroll 1
  for (int64_t piece_idx =
           static_cast<int64_t>(device::block_idx()) * device::num_warps() + device::warp_idx();
       piece_idx < num_pieces;
       piece_idx += num_warps)
    copy_piece(find_piece(params, piece_idx), staged);
}

// Grid: any number of blocks; a warp takes a piece after another.
// Example: 2 copies of 100 and 40 bytes in pieces of 64: first_piece is [0, 2, 3]; pieces 0 and 1
//   are bytes [0, 64) and [64, 100) of the first copy, piece 2 is the second.
template <bool kBulk>
MOE_KERNEL void strided_copies(const StridedCopiesParams params) {
  if constexpr (kBulk && device::kHasBulkCopies) {
    StagedCopies staged;
    copy_pieces(params, &staged);
    staged.finish();
  } else {
    copy_pieces(params, nullptr);
  }
}

}  // namespace

size_t strided_copies_shared_bytes(const StridedCopiesParams& params, int num_threads) {
  return params.is_plain != 0
             ? 0
             : static_cast<size_t>(StagedCopies::shared_bytes(num_threads / device::kWarpSize));
}

void launch_strided_copies(const device::Launch& launch, const StridedCopiesParams& params) {
  if (params.is_plain != 0)
    device::launch(&strided_copies<false>, launch, params);
  else
    device::launch(&strided_copies<true>, launch, params);
}

}  // namespace moe::kernels
