#pragma once

#include <cstdint>
#include <type_traits>

#include "core/error.h"
#include "device/quantize.h"
#include "device/row_copy.h"
#include "kernels/dispatch_shape.h"
#include "kernels/slots.h"
#include "kernels/wait.h"

// Moves of a warp that bring its tokens' rows to their slots.

namespace moe::kernels {

/// A part of a warp's shared memory; see DispatchShape.
struct WarpMemory {
  std::byte* base;
  const DispatchShape& shape;

  MOE_DEVICE std::byte* codes(int stage) const {
    return base + shape.codes_offset + stage * shape.code_bytes;
  }
  MOE_DEVICE device::MBarrier* barriers() const {
    return reinterpret_cast<device::MBarrier*>(base + shape.barriers_offset);
  }
  /// @param set_idx  index of a token among num_stages
  MOE_DEVICE int64_t* slots(int set_idx, int num_slots) const {
    return reinterpret_cast<int64_t*>(base + shape.slots_offset) + set_idx * num_slots;
  }
  MOE_DEVICE std::byte* scales() const { return base + shape.scales_offset; }
};

/// Places of rows on the ranks they are sent to.
class Places {
 public:
  MOE_DEVICE explicit Places(const DispatchParams& params) : params_(params) {}

  MOE_DEVICE const Peer& peer(int64_t slot) const {
    return params_.tables.peers[layout::Slot::rank_idx(slot)];
  }
  /// Base of the window that a slot lies in.
  MOE_DEVICE std::byte* window(int64_t slot) const { return device::load(&peer(slot).rows); }
  /// Address at which this rank writes a row: null for no slot, and for one that its rank copies
  /// to.
  MOE_DEVICE std::byte* row(int64_t slot) const {
    if (!layout::Slot::is_written(slot))
      return nullptr;
    return offset_ptr(window(slot), layout::Slot::row_idx(slot), params_.row_bytes);
  }

 private:
  const DispatchParams& params_;
};

/// Finds the origin of the row in every slot of a token: the row of its first slot on the same rank
/// where that is on another device, so that one row crosses to it; else the slot's own. Marks the
/// slots that are copies. All lanes of the warp call, and may read @p slots afterwards.
/// @param slots  shared, [num_slots]
/// @param is_first  whether it is the first of the warps that share the row: it writes the origins
///   beside the rows
MOE_DEVICE void mark_copies(const DispatchParams& params, int64_t* slots, bool is_first) {
  using layout::Slot;
  const int num_slots = params.choices.num_slots;
#pragma unroll 1
  for (int first = 0; first < num_slots; first += device::kWarpSize) {
    const int i = first + device::lane_idx();
    const int64_t slot = i < num_slots ? device::load(slots + i) : Slot::kNone;
    const int dst_rank = Slot::rank_idx(slot);
    const uint32_t same_rank = device::match_any(static_cast<uint32_t>(dst_rank));
    int64_t origin = device::shuffle(slot, device::first_bit(same_rank));
    if (slot != Slot::kNone) {
      const bool is_elsewhere = device::load_constant(params.buffer.is_elsewhere + dst_rank) != 0;
      if (!is_elsewhere)
        origin = slot;
#pragma unroll 1
      for (int j = 0; is_elsewhere && j < first; ++j) {
        const int64_t earlier = Slot::unmarked(device::load(slots + j));
        if (earlier == Slot::kNone || Slot::rank_idx(earlier) != dst_rank)
          continue;
        origin = earlier;
        break;
      }
      const Peer& peer = params.tables.peers[dst_rank];
      std::byte* const origins =
          device::load(&peer.rows) + device::load(&peer.window.origins_offset);
      if (is_first)
        device::store(reinterpret_cast<int32_t*>(origins) + Slot::row_idx(slot),
                      static_cast<int32_t>(Slot::row_idx(origin)));
      if (origin != slot)
        device::store(slots + i, slot | Slot::kIsCopy);
    }
    device::sync_warp();
  }
}

MOE_DEVICE layout::ScaleMap load_scale_map(const layout::ScaleMap* from) {
  layout::ScaleMap map;
  map.num_scales = device::load(&from->num_scales);
  map.scale_bytes = device::load(&from->scale_bytes);
  map.is_column_major = device::load(reinterpret_cast<const uint8_t*>(&from->is_column_major)) != 0;
  map.group_rows = device::load(&from->group_rows);
  map.group_stride = device::load(&from->group_stride);
  return map;
}

/// Data beside the row of one token, but for its scale factors.
struct RowMetadata {
  const int64_t* slots;  ///< [num_slots]
  int num_slots;
  const std::byte* weights;  ///< [num_topk]
  const int64_t* topk_idx;   ///< [num_topk], by rank
  int num_topk;
};

/// Scale factors, weights and expert ids of tokens, by ordinary stores. All lanes of a warp call.
class RowMetadataWriter {
 public:
  MOE_DEVICE RowMetadataWriter(const DispatchParams& params, std::byte* scales)
      : params_(params), places_(params), scales_(scales) {}

  /// Shared memory of the scale factors of one row, factors that no block has included.
  MOE_DEVICE void clear_scales() const {
    device::fill_bytes(scales_, scale_row_bytes(), 0);
    device::sync_warp();
  }

  /// Gathers scale factors of rows that come with them.
  MOE_DEVICE void gather_scales(int64_t token_idx) const {
    const std::byte* const source = params_.scales + token_idx * params_.scale_row_stride;
    device::with_unit(params_.scale_bytes, [&](auto kind) {
      using Word = decltype(kind);
#pragma unroll 1
      for (int i = device::lane_idx(); i < params_.num_scales; i += device::kWarpSize)
        device::store(reinterpret_cast<Word*>(scales_) + i,
                      device::load(reinterpret_cast<const Word*>(source + i * params_.scale_step)));
    });
    device::sync_warp();
  }

  /// Writes data beside the row of @p token_idx, but for its scale factors, to all its slots.
  MOE_DEVICE void write(int64_t token_idx, const int64_t* slots) const {
    const int num_topk = params_.choices.num_topk;
    write({slots,
           params_.choices.num_slots,
           params_.weight_bytes == 0
               ? nullptr
               : params_.weights + token_idx * num_topk * params_.weight_bytes,
           params_.choices.topk_idx == nullptr ? nullptr
                                               : params_.choices.topk_idx + token_idx * num_topk,
           num_topk});
  }
  MOE_DEVICE void write(const RowMetadata& from) const {
    if (params_.arrangement.is_by_rank())
      write_choices(from);
    else if (params_.weight_bytes > 0)
      write_weights(from);
  }

  /// Scale factors of a row of which this warp has moved a piece: of the piece where it has
  /// quantized it and other warps the others, else of all of it behind the last piece.
  /// @param first, num_elements  of the piece
  template <bool kQuantizes>
  MOE_DEVICE void write_scales(const int64_t* slots,
                               bool is_last,
                               int64_t first,
                               int32_t num_elements) const {
    int begin = 0;
    int end = scale_row_bytes();
    if (kQuantizes && params_.num_parts > 1) {
      const int factor_bytes = params_.quantize.scale_format == layout::ScaleFormat::kUe8m0 ? 1 : 4;
      begin = static_cast<int>(first) / params_.quantize.block * factor_bytes;
      // Bytes behind the factors of the last piece in their word are 0.
      if (!is_last)
        end = static_cast<int>(first + num_elements) / params_.quantize.block * factor_bytes;
    } else if (!is_last) {
      return;
    }
    write_scales(slots, params_.choices.num_slots, scales_, begin, end);
  }

  /// Writes those bytes of the scale factors of a row, whole words, to where the row goes: whoever
  /// copies it copies them, too.
  MOE_DEVICE void write_scales(
      const int64_t* slots, int num_slots, const std::byte* scales, int begin, int end) const {
#pragma unroll 1
    for (int i = 0; i < num_slots; ++i) {
      const int64_t slot = device::load(slots + i);
      if (!layout::Slot::is_written(slot))
        continue;
      const layout::ReceiveWindow& window = places_.peer(slot).window;
      const layout::ScaleMap map = load_scale_map(&window.scales);
      std::byte* const place = places_.window(slot) + device::load(&window.scales_offset) +
                               map.place(layout::Slot::row_idx(slot));
      // The factors of a row lie together: a few wide words do.
      const int unit =
          map.is_column_major
              ? params_.scale_bytes
              : device::widest_unit(static_cast<uint64_t>(scale_row_bytes() | begin | end));
      const int64_t step = map.is_column_major ? map.step() : unit;
      device::copy_strided(
          place + begin / unit * step, step, scales + begin, unit, (end - begin) / unit, unit);
    }
  }

  /// Bytes of the scale factors of a row.
  MOE_DEVICE int scale_row_bytes() const { return params_.num_scales * params_.scale_bytes; }

 private:
  /// The weight of choice k goes to slot k.
  MOE_DEVICE void write_weights(const RowMetadata& from) const {
    device::with_unit(params_.weight_bytes, [&](auto kind) {
      using Weight = decltype(kind);
#pragma unroll 1
      for (int k = device::lane_idx(); k < from.num_slots; k += device::kWarpSize) {
        const int64_t slot = layout::Slot::unmarked(device::load(from.slots + k));
        if (slot == layout::Slot::kNone)
          continue;
        const auto weight = device::load(reinterpret_cast<const Weight*>(from.weights) + k);
        std::byte* const weights =
            places_.window(slot) + device::load(&places_.peer(slot).window.weights_offset);
        device::store(reinterpret_cast<Weight*>(weights) + layout::Slot::row_idx(slot), weight);
      }
    });
  }

  /// Rank-major: all weights and ids of a token that belong to the receiver. A receiver's rows have
  /// room for as many choices as any rank makes.
  MOE_DEVICE void write_choices(const RowMetadata& from) const {
    if (params_.weight_bytes == 0 && params_.with_topk_idx == 0)
      return;
    const int64_t num_recv_topk = device::load(params_.tables.num_rows + 1);
#pragma unroll 1
    for (int64_t k = device::lane_idx(); k < num_recv_topk; k += device::kWarpSize) {
      const int64_t expert_idx = k < from.num_topk ? device::load(from.topk_idx + k) : -1;
      const int owner =
          expert_idx < 0 ? -1 : device::load_constant(params_.buffer.expert_rank + expert_idx);
      const int64_t local_idx = expert_idx < 0 ? -1 : local_expert_idx(expert_idx, owner);
      device::with_unit(params_.weight_bytes, [&](auto kind) {
        using Weight = decltype(kind);
        Weight weight{};
        if (params_.weight_bytes > 0 && owner >= 0)
          weight = device::load(reinterpret_cast<const Weight*>(from.weights) + k);
#pragma unroll 1
        for (int i = 0; i < from.num_slots; ++i) {
          const int64_t slot = device::load(from.slots + i);
          if (slot == layout::Slot::kNone)
            continue;
          const bool is_there = owner == layout::Slot::rank_idx(slot);
          const layout::ReceiveWindow& window = places_.peer(slot).window;
          std::byte* const base = places_.window(slot);
          const int64_t place = layout::Slot::row_idx(slot) * num_recv_topk + k;
          if (params_.with_topk_idx != 0)
            device::store(
                reinterpret_cast<int64_t*>(base + device::load(&window.topk_idx_offset)) + place,
                is_there ? local_idx : int64_t{-1});
          if (params_.weight_bytes > 0)
            device::store(
                reinterpret_cast<Weight*>(base + device::load(&window.weights_offset)) + place,
                is_there ? weight : Weight{});
        }
      });
    }
  }

  /// Position of an expert among those of its owner, which are in ascending order.
  MOE_DEVICE int64_t local_expert_idx(int64_t expert_idx, int owner) const {
    const int32_t first = device::load_constant(params_.buffer.first_of_rank + owner);
    int32_t low = first;
    int32_t high = device::load_constant(params_.buffer.first_of_rank + owner + 1);
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      if (device::load_constant(params_.buffer.experts_by_rank + middle) <= expert_idx)
        low = middle;
      else
        high = middle;
    }
    return low - first;
  }

  const DispatchParams& params_;
  Places places_;
  std::byte* scales_;
};

/// The pieces of the rows that a warp moves, in order: every DispatchParams::num_parts-th of a row.
/// Tokens without a slot are passed by: nobody reads their rows. All lanes of the warp call.
class RowWalk {
 public:
  struct Piece {
    int32_t token_idx = 0;
    int32_t piece_idx = 0;
    const int64_t* slots = nullptr;  ///< shared; see mark_copies()
  };

  MOE_DEVICE RowWalk(const DispatchParams& params, const WarpMemory& memory)
      : params_(params), finder_(params), memory_(memory) {
    // Warps that share rows are on different SMs.
    const int warp = device::warp_idx() * device::num_blocks() + device::block_idx();
    part_ = warp % params.num_parts;
    const int group = warp / params.num_parts;
    const bool has_rows = group < num_groups() && part_ < memory.shape.pieces.num_pieces;
    next_token_ = has_rows ? group : num_tokens();
    piece_.piece_idx = memory.shape.pieces.num_pieces;
    is_first_ = part_ == (piece_.piece_idx - 1) % params.num_parts;
  }

  /// Moves to the next piece. @return false behind the last.
  MOE_DEVICE bool advance() {
    if (piece_.piece_idx + params_.num_parts < memory_.shape.pieces.num_pieces) {
      piece_.piece_idx += params_.num_parts;
      return true;
    }
    while (next_token_ < num_tokens()) {
      const int32_t token_idx = next_token_;
      next_token_ += num_groups();
      int64_t* const slots = memory_.slots(set_idx_, params_.choices.num_slots);
      if (!finder_.find(token_idx, slots, is_first_))
        continue;
      if (params_.arrangement.has_origins)
        mark_copies(params_, slots, is_first_);
      set_idx_ = (set_idx_ + 1) % memory_.shape.num_stages;
      piece_ = {token_idx, part_, slots};
      return true;
    }
    return false;
  }
  MOE_DEVICE const Piece& piece() const { return piece_; }

 private:
  MOE_DEVICE int32_t num_tokens() const { return static_cast<int32_t>(params_.choices.num_tokens); }
  /// Number of groups of warps that share rows.
  MOE_DEVICE int num_groups() const {
    return device::num_blocks() * device::num_warps() / params_.num_parts;
  }

  const DispatchParams& params_;
  SlotFinder finder_;
  const WarpMemory& memory_;
  int32_t next_token_;
  int32_t part_;  ///< part of rows: the first piece that this warp moves
  /// True where this warp moves the last piece of rows, and writes behind it what else stands
  /// beside them, by choices that it has found itself.
  bool is_first_;
  int set_idx_ = 0;
  Piece piece_;
};

/// Elements of rows in memory: bytes that move as they are, or numbers (device::BFloat16 ...) that
/// are quantized.
struct Bytes {};

/// Calls @p launch with a Bytes{}, device::BFloat16{} ... for what a dispatch reads. Host.
template <typename Launch>
void with_source(const Quantize& quantize, const Launch& launch) {
  if (quantize.is_on == 0)
    return launch(Bytes{});
  switch (quantize.dtype) {
    case DType::kBFloat16:
      return launch(device::BFloat16{});
    case DType::kFloat16:
      return launch(device::Float16{});
    case DType::kFloat32:
      return launch(device::Float32{});
    case DType::kFloat64:
    case DType::kBytes:
      break;
  }
  throw InvalidArgument(concat("dispatch quantizes bfloat16, float16 or float32 rows, got ",
                               dtype_name(quantize.dtype)));
}

/// A lane's elements of a row, widened; +0.0 behind its end.
/// @param from   the first of them
/// @param num_elements  elements that are there, at most kLaneElements
/// @param unit   bytes that divide the address of every lane's first element
template <typename Number>
MOE_DEVICE void load_elements(const std::byte* from,
                              int32_t num_elements,
                              int unit,
                              float (&values)[device::kLaneElements]) {
  using Bits = typename Number::Bits;
  constexpr int kPerUnit = device::kElementsPerUnit<Number, device::Bytes16>;
  constexpr int kNumUnits = device::kLaneElements / kPerUnit;
  if (unit == 16 && num_elements == device::kLaneElements) {
    device::Bytes16 units[kNumUnits];
#pragma unroll
    for (int i = 0; i < kNumUnits; ++i)
      units[i] = device::load(reinterpret_cast<const device::Bytes16*>(from) + i);
#pragma unroll
    for (int i = 0; i < kNumUnits; ++i)
      device::widen_unit<Number>(units[i], values + i * kPerUnit);
    return;
  }
#pragma unroll
  for (int i = 0; i < device::kLaneElements; ++i)
    values[i] = i < num_elements
                    ? Number::widen(device::load(reinterpret_cast<const Bits*>(from) + i))
                    : 0.0f;
}

/// Stores a lane's codes, of which @p num_codes count. @param unit  bytes that divide the address
MOE_DEVICE void store_codes(std::byte* to,
                            const device::Bytes16& codes,
                            int32_t num_codes,
                            int unit) {
  if (unit == 16 && num_codes == device::kLaneElements) {
    device::store(reinterpret_cast<device::Bytes16*>(to), codes);
    return;
  }
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    if (unit >= 4 && num_codes >= 4 * word + 4) {
      device::store(reinterpret_cast<uint32_t*>(to) + word, codes.words[word]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (4 * word + i < num_codes)
        device::store(reinterpret_cast<uint8_t*>(to) + 4 * word + i,
                      static_cast<uint8_t>(codes.words[word] >> (8 * i)));
  }
}

/// Quantizes a piece of a row; all lanes of the warp call.
/// @param first  element of the row that the piece begins with, a multiple of the block
/// @param put    put(element, codes, num_codes): a lane's codes, where @p element counts from the
///               piece's first
template <typename Number, typename Put>
MOE_DEVICE void quantize_piece(const Quantize& quantize,
                               const std::byte* piece,
                               int64_t first,
                               int32_t num_elements,
                               int unit,
                               std::byte* scales,
                               const Put& put) {
  for (int32_t group = 0; group < num_elements; group += device::kWarpElements) {
    const int32_t own = group + device::lane_idx() * device::kLaneElements;
    int32_t num_own = num_elements - own;
    num_own = num_own < 0 ? 0 : num_own < device::kLaneElements ? num_own : device::kLaneElements;
    float values[device::kLaneElements];
    load_elements<Number>(
        piece + own * static_cast<int32_t>(sizeof(typename Number::Bits)), num_own, unit, values);
    device::BlockScale scale;
    const device::Bytes16 codes = device::quantize_elements(
        values, quantize.block, quantize.least_amax, quantize.scale_format, &scale);
    if (num_own == 0)
      continue;
    if (own % quantize.block == 0)
      device::store_scale(scales, (first + own) / quantize.block, scale, quantize.scale_format);
    put(own, codes, num_own);
  }
}

/// Moves the rows of this warp's tokens by bulk copies: each is read once into the stages and
/// stored from there to all slots that this rank writes.
template <typename Source>
MOE_DEVICE void move_by_bulk_copies(const DispatchParams& params, const WarpMemory& memory) {
  constexpr bool kQuantizes = !std::is_same_v<Source, Bytes>;
  const DispatchShape& shape = memory.shape;
  const Places places(params);
  const RowMetadataWriter metadata(params, memory.scales());
  RowWalk walk(params, memory);
  device::StageRing<DispatchShape::kNumStages> ring(
      memory.base, shape.stage_bytes, memory.barriers());
  ProgressReporter progress(params.buffer);
  const int num_slots = params.choices.num_slots;
  const auto bytes_of = [&](const RowWalk::Piece& piece) {
    return shape.pieces.bytes_of(piece.piece_idx, params.source_row_bytes);
  };
  const auto load = [&](uint32_t idx, const RowWalk::Piece& piece) {
    ring.load(idx,
              offset_ptr(params.x, piece.token_idx, params.source_row_bytes) +
                  shape.pieces.offset_of(piece.piece_idx),
              static_cast<uint32_t>(bytes_of(piece)));
  };
  // Bulk copies read and overwrite what this rank's stream and its peers wrote so far.
  device::fence_proxy_async();
  metadata.clear_scales();
  bool has_piece = walk.advance();
  if (has_piece)
    load(0, walk.piece());
  for (uint32_t idx = 0; has_piece; ++idx) {
    const RowWalk::Piece piece = walk.piece();
    has_piece = walk.advance();
    if (has_piece)
      load(idx + 1, walk.piece());
    const bool is_last = piece.piece_idx + 1 == shape.pieces.num_pieces;
    const std::byte* stored = ring.stage(idx);
    int32_t stored_bytes = bytes_of(piece);
    int64_t offset = shape.pieces.offset_of(piece.piece_idx);
    ring.await(idx);
    if constexpr (kQuantizes) {
      constexpr auto kElementBytes = static_cast<int32_t>(sizeof(typename Source::Bits));
      std::byte* const codes = memory.codes(ring.stage_of(idx));
      offset /= kElementBytes;
      stored_bytes /= kElementBytes;
      quantize_piece<Source>(params.quantize,
                             stored,
                             offset,
                             stored_bytes,
                             16,
                             memory.scales(),
                             [&](int32_t element, const device::Bytes16& own, int32_t num_own) {
                               store_codes(codes + element, own, num_own, 16);
                             });
      stored = codes;
      device::fence_proxy_async_shared();
      device::sync_warp();
    } else if (is_last && params.num_scales > 0) {
      metadata.gather_scales(piece.token_idx);
    }
    // A lane stores to a slot: one that stored to all would find their places one after another.
#pragma unroll 1
    for (int i = device::lane_idx(); i < num_slots; i += device::kWarpSize)
      if (std::byte* const row = places.row(device::load(piece.slots + i)))
        device::bulk_store(row + offset, stored, static_cast<uint32_t>(stored_bytes));
    device::commit_bulk_stores();
    if (params.num_scales > 0)
      metadata.write_scales<kQuantizes>(piece.slots, is_last, offset, stored_bytes);
    if (is_last)
      metadata.write(piece.token_idx, piece.slots);
    progress.tick();
    // Slots, codes and scale factors may be written over.
    device::sync_warp();
  }
}

/// Moves the rows of this warp's tokens by loads and stores.
template <typename Source>
MOE_DEVICE void move_by_loads(const DispatchParams& params, const WarpMemory& memory) {
  constexpr bool kQuantizes = !std::is_same_v<Source, Bytes>;
  const BulkPieces& pieces = memory.shape.pieces;
  const Places places(params);
  const RowMetadataWriter metadata(params, memory.scales());
  const int num_slots = params.choices.num_slots;
  RowWalk walk(params, memory);
  ProgressReporter progress(params.buffer);
  const int source_unit = device::widest_unit(reinterpret_cast<uint64_t>(params.x) |
                                              static_cast<uint64_t>(params.source_row_bytes));
  const int wire_unit = device::widest_unit(static_cast<uint64_t>(params.row_bytes));
  metadata.clear_scales();
  while (walk.advance()) {
    const RowWalk::Piece& piece = walk.piece();
    const bool is_last = piece.piece_idx + 1 == pieces.num_pieces;
    const int64_t source_offset = pieces.offset_of(piece.piece_idx);
    const int32_t source_bytes = pieces.bytes_of(piece.piece_idx, params.source_row_bytes);
    const std::byte* const source =
        offset_ptr(params.x, piece.token_idx, params.source_row_bytes) + source_offset;
    int64_t offset = source_offset;
    int32_t stored_bytes = source_bytes;
    const auto place_of = [&](int i) {
      std::byte* const row = places.row(device::load(piece.slots + i));
      return row == nullptr ? nullptr : row + offset;
    };
    if constexpr (kQuantizes) {
      constexpr auto kElementBytes = static_cast<int32_t>(sizeof(typename Source::Bits));
      offset /= kElementBytes;
      stored_bytes /= kElementBytes;
      quantize_piece<Source>(params.quantize,
                             source,
                             offset,
                             stored_bytes,
                             source_unit,
                             memory.scales(),
                             [&](int32_t element, const device::Bytes16& codes, int32_t num_own) {
                               for (int i = 0; i < num_slots; ++i)
                                 if (std::byte* const place = place_of(i))
                                   store_codes(place + element, codes, num_own, wire_unit);
                             });
      device::sync_warp();
    } else {
      const int unit = source_unit < wire_unit ? source_unit : wire_unit;
      device::copy_row(source, source_bytes, unit, num_slots, place_of);
      if (is_last && params.num_scales > 0)
        metadata.gather_scales(piece.token_idx);
    }
    if (params.num_scales > 0)
      metadata.write_scales<kQuantizes>(piece.slots, is_last, offset, stored_bytes);
    if (is_last)
      metadata.write(piece.token_idx, piece.slots);
    progress.tick();
    device::sync_warp();
  }
}

}  // namespace moe::kernels
