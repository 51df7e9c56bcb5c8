#pragma once

#include <cstdint>

#include "device/row_copy.h"
#include "kernels/internode_combine_sources.h"

// Requests of a warp for rows of other nodes, and its answers to theirs.

namespace moe::kernels {

/// Chunks that a warp asks for and adds, and places that replies to them have. Warps use as many
/// places as there are, each the same number; a place is asked for again once its rows were added.
struct ReplyTurns {
  int64_t num_units = 0;  ///< warps that ask and add
  int64_t num_ahead = 0;  ///< places of each
  int64_t first_chunk = 0;

  MOE_DEVICE static ReplyTurns make(const layout::RailReply& reply) {
    const int64_t num_warps = static_cast<int64_t>(device::num_blocks()) * device::num_warps();
    ReplyTurns turns;
    turns.num_units = num_warps < reply.num_windows ? num_warps : reply.num_windows;
    turns.num_ahead = turns.num_units > 0 ? reply.num_windows / turns.num_units : 0;
    turns.first_chunk =
        static_cast<int64_t>(device::warp_idx()) * device::num_blocks() + device::block_idx();
    return turns;
  }
  MOE_DEVICE int64_t chunk(int64_t turn) const { return first_chunk + turn * num_units; }
  MOE_DEVICE int64_t place(int64_t chunk_idx) const { return chunk_idx % (num_units * num_ahead); }
};

/// Returns whether @p bits, of addresses and sizes or-ed together, are in units of 16 bytes on
/// every lane.
MOE_DEVICE bool is_aligned(uint64_t bits) {
  return device::all(bits % sizeof(device::Bytes16) == 0);
}

/// Sums of rows on this node that a rank of another node asked for, one token after another. All
/// lanes of a warp call.
template <typename Number>
class NodeSums {
 public:
  using Scalar = typename Number::Scalar;

  /// @param request  request as it came
  /// @param shared   shared memory of the warp; what TokenSources found is lost
  MOE_DEVICE NodeSums(const CombineParams& params,
                      const Rails& rails,
                      const TokenSources<true>& sources,
                      const layout::RailReply::Header& header,
                      const std::byte* request,
                      std::byte* shared)
      : sources_(sources),
        slots_(reinterpret_cast<const int64_t*>(request + sizeof(header))),
        request_weights_(request + layout::RailReply::request_bytes(header.num_slots)),
        num_slots_(header.num_slots),
        weight_bytes_(header.weight_bytes),
        row_bytes_(combined_row_bytes(params)),
        rows_(reinterpret_cast<uint64_t*>(shared)),
        weights_(reinterpret_cast<Scalar*>(shared +
                                           CombineWarpShape::make(params, rails).weights_offset)) {}

  /// Adds the rows of the next token, in the order of the request, and rounds once.
  MOE_DEVICE void add_next(std::byte* to) {
    take();
    uint64_t bits = static_cast<uint64_t>(row_bytes_) | reinterpret_cast<uint64_t>(to);
#pragma unroll 1
    for (int i = device::lane_idx(); i < num_rows_; i += device::kWarpSize)
      bits |= device::load_shared(rows_ + i);
    if (is_aligned(bits))
      add<device::Bytes16>(to);
    else
      add<typename Number::Bits>(to);
    device::sync_warp();
  }

 private:
  /// Every lane looks up slots, until one is the first of the next token.
  MOE_DEVICE void take() {
    using layout::Slot;
    uint32_t ends = 0;
#pragma unroll 1
    for (num_rows_ = 0; ends == 0;) {
      const int64_t i = next_ + num_rows_ + device::lane_idx();
      const int64_t slot = i < num_slots_ ? device::load(slots_ + i) : Slot::kFirstOfToken;
      ends = device::ballot(i > next_ && (slot & Slot::kFirstOfToken) != 0);
      const int count = ends == 0 ? device::kWarpSize : device::first_bit(ends);
      if (device::lane_idx() < count) {
        const int place = num_rows_ + device::lane_idx();
        const std::byte* const row = sources_.local_row(slot & ~Slot::kFirstOfToken);
        device::store(rows_ + place, reinterpret_cast<uint64_t>(row));
        device::store(weights_ + place, load_weight(i));
      }
      num_rows_ += count;
    }
    next_ += num_rows_;
    device::sync_warp();
  }

  /// 1 where none is applied: a product with it is the row.
  MOE_DEVICE Scalar load_weight(int64_t i) const {
    if (weight_bytes_ == 0)
      return Scalar{1};
    if constexpr (sizeof(Scalar) == 8)
      if (weight_bytes_ == 8)
        return device::load(reinterpret_cast<const double*>(request_weights_) + i);
    return device::load(reinterpret_cast<const float*>(request_weights_) + i);
  }

  template <typename Unit>
  MOE_DEVICE void add(std::byte* to) const {
    for_pieces<Unit>(row_bytes_, [&](int64_t offset, int num_units) {
      LaneSums<Number, Unit> sums;
      for (int i = 0; i < num_rows_; ++i) {
        LaneUnits<Unit> row;
        row.load(reinterpret_cast<const std::byte*>(device::load_shared(rows_ + i)) + offset,
                 num_units);
        sums.template add<true>(row, device::load_shared(weights_ + i));
      }
      sums.template store<true>(to + offset, num_units);
    });
  }

  const TokenSources<true>& sources_;
  const int64_t* slots_;
  const std::byte* request_weights_;
  int64_t num_slots_;
  int32_t weight_bytes_;
  int64_t row_bytes_;
  uint64_t* rows_;
  Scalar* weights_;
  int64_t next_ = 0;
  int num_rows_ = 0;
};

/// Requests and replies. All lanes of a warp call.
/// @tparam kReduces  as of TokenSources
template <typename Number, bool kReduces>
class RailRequests {
 public:
  /// @param shared  shared memory of the warp
  MOE_DEVICE RailRequests(const CombineParams& params,
                          const Rails& rails,
                          const layout::RailReply& reply,
                          const TokenSources<kReduces>& sources,
                          std::byte* shared)
      : params_(params),
        rails_(rails),
        rail_(params.buffer, rails),
        reply_(reply),
        sources_(sources),
        shared_(shared),
        row_bytes_(combined_row_bytes(params)),
        weight_bytes_(kReduces && params.weights != nullptr ? params.weight_bytes : 0),
        epoch_(device::load(params.tables.epoch)) {}

  MOE_DEVICE int64_t first_token(int64_t chunk_idx) const {
    return chunk_idx * rails_.tokens_per_chunk;
  }
  MOE_DEVICE int64_t end_token(int64_t chunk_idx) const {
    const int64_t end = first_token(chunk_idx + 1);
    return end < params_.num_tokens ? end : params_.num_tokens;
  }
  /// Chunks of the rail's rank on a node.
  MOE_DEVICE int64_t num_chunks(int src_node) const {
    const layout::Workspace own = workspace(params_.buffer, params_.buffer.rank_idx);
    return rails_.num_chunks(device::load(&own.row(epoch_, rail_.rank_of(src_node)).num_tokens));
  }

  /// Asks every other node for the rows of a chunk, or for none.
  MOE_DEVICE void ask(int64_t chunk_idx, int64_t place) const {
    const int own_node = rail_.own_node();
    const int64_t offset = chunk_idx * reply_.request_stride;
    if constexpr (kReduces)
      sources_.count(first_token(chunk_idx), end_token(chunk_idx));
    else
      sources_.begin_chunk();
#pragma unroll 1
    for (int64_t token = first_token(chunk_idx); token < end_token(chunk_idx); ++token)
      sources_.walk(token, [&](const typename TokenSources<kReduces>::Place& at) {
        if (at.node_idx != own_node)
          write_slot(token, at, rails_.map.area_out(own_node, at.node_idx) + offset);
      });
#pragma unroll 1
    for (int i = 0; i < rail_.num_remote_nodes(); ++i) {
      const int node_idx = rail_.remote_node(i);
      if (!rail_.is_active(rail_.rank_of(node_idx)))
        continue;
      const int64_t from = rails_.map.area_out(own_node, node_idx) + offset;
      const layout::RailReply::Header header{sources_.num_slots(node_idx),
                                             sources_.num_rows(node_idx),
                                             static_cast<int32_t>(place),
                                             weight_bytes_};
      if (device::lane_idx() == 0)
        write_header(header, from);
      rail_.put(node_idx,
                rails_.map.area_in(node_idx, own_node) + offset,
                from,
                reply_.request_bytes(header.num_slots, header.weight_bytes),
                rails_.map.chunk_signal(node_idx, own_node, chunk_idx),
                epoch_);
    }
    device::sync_warp();
  }

  /// Waits for a request of the rail's rank on @p src_node and answers it. @return false when the
  /// kernel is to leave.
  MOE_DEVICE bool answer(int src_node, int64_t chunk_idx, ProgressReporter* progress) const {
    const int own_node = rail_.own_node();
    if (!await(src_node, rails_.map.chunk_signal(own_node, src_node, chunk_idx)))
      return false;
    const std::byte* const request =
        rail_.at(rails_.map.area_in(own_node, src_node) + chunk_idx * reply_.request_stride);
    const layout::RailReply::Header header = read_header(request);
    if (header.num_slots == 0)
      return true;
    const int64_t offset = reply_.replies_offset + header.place * reply_.window_bytes();
    const int64_t from = rails_.map.area_out(own_node, src_node) + offset;
    write_rows(header, request, rail_.at(from), progress);
    if (params_.pulled_bytes > 0)
      write_weights(header, request, rail_.at(from + reply_.reply_bytes(header.num_rows, 0)));
    rail_.put(src_node,
              rails_.map.area_in(src_node, own_node) + offset,
              from,
              reply_.reply_bytes(header.num_rows, header.num_slots),
              rails_.map.reply_signal(src_node, own_node, chunk_idx),
              epoch_);
    device::sync_warp();
    return true;
  }

  /// Waits for the rows of a chunk from every node that has some, and leaves it counted. @return
  /// false when the kernel is to leave.
  MOE_DEVICE bool await_rows(int64_t chunk_idx) const {
    sources_.count(first_token(chunk_idx), end_token(chunk_idx));
#pragma unroll 1
    for (int i = 0; i < rail_.num_remote_nodes(); ++i) {
      const int node_idx = rail_.remote_node(i);
      if (sources_.total_rows(node_idx) > 0 &&
          !await(node_idx, rails_.map.reply_signal(rail_.own_node(), node_idx, chunk_idx)))
        return false;
    }
    return true;
  }

 private:
  using Header = layout::RailReply::Header;

  MOE_DEVICE bool await(int src_node, int64_t signal) const {
    const WaitSite site{
        layout::Phase::kData, static_cast<int32_t>(layout::Operation::kCombine), epoch_, false};
    return rail_.await(site, src_node, signal, epoch_, params_.buffer.stall_limit_ns);
  }

  /// A slot of the own tokens, with its weight where that travels. By one lane.
  /// @param request  offset in the region
  MOE_DEVICE void write_slot(int64_t token_idx,
                             const typename TokenSources<kReduces>::Place& at,
                             int64_t request) const {
    const int64_t mark = at.is_first ? layout::Slot::kFirstOfToken : 0;
    device::store(rail_.at<int64_t>(request + reply_.request_bytes(at.idx)), at.slot | mark);
    if (weight_bytes_ == 0)
      return;
    const int64_t choice = token_idx * params_.num_topk + at.slot_idx;
    const int64_t place = request + reply_.request_bytes(sources_.total_slots(at.node_idx)) +
                          int64_t{at.idx} * weight_bytes_;
    if (weight_bytes_ == 8)
      device::store(
          rail_.at<uint64_t>(place),
          device::load_constant(reinterpret_cast<const uint64_t*>(params_.weights) + choice));
    else
      device::store(
          rail_.at<uint32_t>(place),
          device::load_constant(reinterpret_cast<const uint32_t*>(params_.weights) + choice));
  }

  MOE_DEVICE void write_header(const Header& header, int64_t request) const {
    auto* const to = rail_.at<Header>(request);
    device::store(&to->num_slots, header.num_slots);
    device::store(&to->num_rows, header.num_rows);
    device::store(&to->place, header.place);
    device::store(&to->weight_bytes, header.weight_bytes);
  }
  static MOE_DEVICE Header read_header(const std::byte* request) {
    const auto* const from = reinterpret_cast<const Header*>(request);
    return {device::load(&from->num_slots),
            device::load(&from->num_rows),
            device::load(&from->place),
            device::load(&from->weight_bytes)};
  }
  static MOE_DEVICE int64_t slot_at(const std::byte* request, int64_t i) {
    const auto* const slots = reinterpret_cast<const int64_t*>(request + sizeof(Header));
    return device::load(slots + i) & ~layout::Slot::kFirstOfToken;
  }

  MOE_DEVICE void write_rows(const Header& header,
                             const std::byte* request,
                             std::byte* to,
                             ProgressReporter* progress) const {
    if constexpr (kReduces) {
      NodeSums<Number> sums(params_, rails_, sources_, header, request, shared_);
#pragma unroll 1
      for (int64_t i = 0; i < header.num_rows; ++i) {
        sums.add_next(to + i * reply_.row_stride);
        progress->tick();
      }
    } else {
#pragma unroll 1
      for (int64_t i = 0; row_bytes_ > 0 && i < header.num_rows; ++i) {
        copy_row(sources_.local_row(slot_at(request, i)), to + i * reply_.row_stride);
        progress->tick();
      }
    }
  }

  MOE_DEVICE void copy_row(const std::byte* from, std::byte* to) const {
    const int unit =
        device::widest_unit(reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) |
                            static_cast<uint64_t>(row_bytes_));
    device::copy_row(from, row_bytes_, unit, 1, [&](int) { return to; });
  }

  /// Weights that are pulled, word by word.
  MOE_DEVICE void write_weights(const Header& header,
                                const std::byte* request,
                                std::byte* to) const {
    constexpr auto kWordBytes = static_cast<int64_t>(sizeof(uint32_t));
    const auto words_per_slot = static_cast<int32_t>(reply_.weights_stride / kWordBytes);
    for (int32_t i = device::lane_idx(); i < header.num_slots * words_per_slot;
         i += device::kWarpSize) {
      const std::byte* const from = sources_.local_weights(slot_at(request, i / words_per_slot));
      device::store(reinterpret_cast<uint32_t*>(to) + i,
                    device::load(reinterpret_cast<const uint32_t*>(from) + i % words_per_slot));
    }
  }

  const CombineParams& params_;
  const Rails& rails_;
  RailMemory rail_;
  const layout::RailReply& reply_;
  const TokenSources<kReduces>& sources_;
  std::byte* shared_;
  int64_t row_bytes_;
  int32_t weight_bytes_;
  uint64_t epoch_;
};

}  // namespace moe::kernels
