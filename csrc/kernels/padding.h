#pragma once

#include <cstdint>

#include "device/row_copy.h"
#include "kernels/dispatch_rows.h"

namespace moe::kernels {

/// Zeroes rows of this rank's window that no rank sends: data, scale factors, weights 0, ids -1;
/// they are copies of no other row.
/// Padding belongs to the receiver, so nobody waits for it but this rank's stream. All warps of the
/// grid call and share the rows.
class Padding {
 public:
  MOE_DEVICE explicit Padding(const DispatchParams& params)
      : params_(params), peer_(params.tables.peers[params.buffer.rank_idx]) {}

  MOE_DEVICE void zero() {
    if (params_.arrangement.layout == layout::RowLayout::kLowLatency)
      return;  // what is not filled is undefined
    const int64_t num_rows = device::load(params_.tables.num_rows);
    if (params_.arrangement.is_by_rank()) {
      zero_rows(num_received_by_rank(), num_rows);
      return;
    }
    const Tables& tables = params_.tables;
    const int num_experts = params_.buffer.num_local_experts;
#pragma unroll 1
    for (int first = 0; first < num_experts; first += device::kWarpSize) {
      const int expert_idx = first + device::lane_idx();
      int64_t begin = 0;
      int64_t end = 0;
      if (expert_idx < num_experts) {
        begin = device::load(tables.expert_offsets + expert_idx) +
                device::load(tables.num_tokens_per_expert + expert_idx);
        end = device::load(tables.expert_offsets + expert_idx + 1);
      }
      for (uint32_t padded = device::ballot(begin < end); padded != 0; padded &= padded - 1) {
        const int lane = device::first_bit(padded);
        zero_rows(device::shuffle(begin, lane), device::shuffle(end, lane));
      }
    }
    zero_rows(device::load(tables.expert_offsets + num_experts), num_rows);
  }

 private:
  MOE_DEVICE int64_t num_received_by_rank() const {
    const Buffer& buffer = params_.buffer;
    const int stride = layout::Row::num_counts(buffer.num_ranks, buffer.num_experts);
    int64_t num_rows = 0;
    for (int src_rank = device::lane_idx(); src_rank < buffer.num_ranks;
         src_rank += device::kWarpSize)
      num_rows += device::load(params_.tables.counts + int64_t{src_rank} * stride +
                               buffer.num_experts + buffer.rank_idx);
    return device::warp_sum(num_rows);
  }

  /// Warps take rows in turn, counted over all ranges.
  MOE_DEVICE void zero_rows(int64_t begin, int64_t end) {
    if (begin >= end)
      return;
    const auto num_warps = static_cast<int64_t>(device::num_blocks()) * device::num_warps();
    const int64_t own =
        static_cast<int64_t>(device::warp_idx()) * device::num_blocks() + device::block_idx();
#pragma unroll 1
    for (int64_t row_idx = begin + (own + num_warps - num_before_ % num_warps) % num_warps;
         row_idx < end;
         row_idx += num_warps)
      zero_row(row_idx);
    num_before_ += end - begin;
  }

  MOE_DEVICE void zero_row(int64_t row_idx) const {
    std::byte* const base = device::load(&peer_.rows);
    device::fill_bytes(offset_ptr(base, row_idx, params_.row_bytes), params_.row_bytes, 0);
    if (params_.num_scales > 0)
      zero_scales(base, row_idx);
    if (params_.arrangement.has_origins && device::lane_idx() == 0)
      device::store(
          reinterpret_cast<int32_t*>(base + device::load(&peer_.window.origins_offset)) + row_idx,
          static_cast<int32_t>(row_idx));
    const int64_t per_row =
        params_.arrangement.is_by_rank() ? device::load(params_.tables.num_rows + 1) : 1;
    const int64_t weights = per_row * params_.weight_bytes;
    device::fill_bytes(
        base + device::load(&peer_.window.weights_offset) + row_idx * weights, weights, 0);
    if (params_.with_topk_idx != 0)
      device::fill_bytes(base + device::load(&peer_.window.topk_idx_offset) + row_idx * per_row * 8,
                         per_row * 8,
                         0xFF);
  }

  MOE_DEVICE void zero_scales(std::byte* base, int64_t row_idx) const {
    const layout::ScaleMap map = load_scale_map(&peer_.window.scales);
    std::byte* const scales = base + device::load(&peer_.window.scales_offset) + map.place(row_idx);
    if (!map.is_column_major) {
      device::fill_bytes(scales, map.num_scales * map.scale_bytes, 0);
      return;
    }
    device::with_unit(static_cast<int>(map.scale_bytes), [&](auto kind) {
      using Word = decltype(kind);
#pragma unroll 1
      for (int64_t i = device::lane_idx(); i < map.num_scales; i += device::kWarpSize)
        device::store(reinterpret_cast<Word*>(scales + i * map.step()), Word{});
    });
  }

  const DispatchParams& params_;
  const Peer& peer_;
  int64_t num_before_ = 0;
};

}  // namespace moe::kernels
