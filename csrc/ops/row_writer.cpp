#include "ops/row_writer.h"

#include <cstring>

namespace moe::ops {

using layout::Slot;

RowWriter::RowWriter(Endpoint& endpoint,
                     const DispatchParams& params,
                     const SlotTable& table,
                     const RowTargets& targets,
                     Exchange& exchange)
    : endpoint_(endpoint), params_(params), table_(table), targets_(targets), exchange_(exchange) {}

void RowWriter::write(int64_t begin, int64_t end, cpu::StoreMode mode) {
  const int64_t num_tokens = end - begin;
  endpoint_.for_tokens(num_tokens,
                       num_tokens * table_.num_slots * params_.row_bytes,
                       [&](int64_t first, int64_t last) {
                         write_tokens(begin + first, begin + last, first == 0, mode);
                       });
}

void RowWriter::write_to_message(int64_t token_idx, std::byte* row, std::byte* scales) const {
  // The last of packed scale factors need not fill its word, and memory of messages is reused.
  if (params_.is_quantized_here)
    std::memset(scales, 0, static_cast<size_t>(params_.num_scales * params_.scale_bytes));
  write_row(token_idx, &row, 1, scales, cpu::StoreMode::kCached);
}

void RowWriter::write_tokens(int64_t begin, int64_t end, bool is_first, cpu::StoreMode mode) {
  const cpu::FloatingPointScope scope;
  Scratch scratch;
  scratch.places.resize(static_cast<size_t>(table_.num_slots));
  scratch.scales.resize(static_cast<size_t>(params_.num_scales * params_.scale_bytes));
  // Rows that came from another node need not have brought their experts along.
  const bool has_streams = table_.is_by_rank || table_.topk_idx != nullptr;
  if (params_.num_scales > 0 && mode == cpu::StoreMode::kStreaming && has_streams) {
    const auto& kernels = endpoint_.kernels();
    const int64_t num_streams =
        table_.is_by_rank ? endpoint_.num_ranks() : endpoint_.config().num_experts;
    if (params_.is_column_major())
      scratch.scale_columns.emplace(kernels, num_streams, params_.num_scales, params_.scale_bytes);
    else
      scratch.scale_rows.emplace(kernels, num_streams, params_.num_scales * params_.scale_bytes);
  }
  for (int64_t token_idx = begin; token_idx < end; ++token_idx) {
    const int64_t* const slots = table_.slots + token_idx * table_.num_slots;
    int num_places = 0;
    for (int64_t i = 0; i < table_.num_slots; ++i) {
      if (slots[i] == Slot::kNone)
        continue;
      scratch.places[static_cast<size_t>(num_places++)] =
          offset_ptr(base_of(slots[i]), Slot::row_idx(slots[i]), params_.row_bytes);
    }
    if (num_places > 0) {
      write_row(token_idx, scratch.places.data(), num_places, scratch.scales.data(), mode);
      if (params_.num_scales > 0)
        write_scales(token_idx, slots, &scratch);
      if (table_.is_by_rank)
        write_choices(token_idx, slots);
      else if (params_.weight_bytes > 0)
        write_weights(token_idx, slots);
    }
    if (token_idx % kTokensPerProgress != 0)
      continue;
    if (is_first)
      exchange_.progress();
    if (exchange_.is_aborted())
      break;
  }
  if (scratch.scale_rows)
    scratch.scale_rows->flush_all();
  if (scratch.scale_columns)
    scratch.scale_columns->flush_all();
  // Each thread fences its own streaming stores before its part counts as done.
  endpoint_.kernels().store_fence();
}

void RowWriter::write_row(int64_t token_idx,
                          std::byte* const* places,
                          int num_places,
                          std::byte* scales,
                          cpu::StoreMode mode) const {
  const auto& kernels = endpoint_.kernels();
  const std::byte* const row = offset_ptr(params_.x, token_idx, params_.source_row_bytes);
  if (params_.is_quantized_here) {
    kernels.quantize_row(params_.row_quantization, row, places, num_places, scales, mode);
    return;
  }
  if (params_.num_scales > 0)
    gather_scales(token_idx, scales);
  if (params_.row_bytes % kRowUnit == 0) {
    kernels.fan_out(row, places, num_places, params_.row_bytes, mode);
    return;
  }
  for (int i = 0; i < num_places; ++i)
    kernels.copy(row, places[i], params_.row_bytes, mode);
}

void RowWriter::gather_scales(int64_t token_idx, std::byte* scales) const {
  const auto bytes = static_cast<size_t>(params_.scale_bytes);
  const std::byte* source = params_.scales + token_idx * params_.scale_row_stride;
  for (int64_t i = 0; i < params_.num_scales; ++i, source += params_.scale_step)
    std::memcpy(scales + i * params_.scale_bytes, source, bytes);
}

void RowWriter::write_scales(int64_t token_idx, const int64_t* slots, Scratch* scratch) const {
  const auto bytes = static_cast<size_t>(params_.scale_bytes);
  const std::byte* const scales = scratch->scales.data();
  for (int64_t i = 0; i < table_.num_slots; ++i) {
    if (slots[i] == Slot::kNone)
      continue;
    const auto& window = window_of(slots[i]);
    std::byte* place =
        base_of(slots[i]) + window.scales_offset + window.scales.place(Slot::row_idx(slots[i]));
    const int64_t step = window.scales.step();
    if (scratch->scale_rows)
      scratch->scale_rows->add(scale_stream_idx(token_idx, slots, i), place, scales);
    else if (scratch->scale_columns)
      scratch->scale_columns->add(scale_stream_idx(token_idx, slots, i), place, step, scales);
    else if (!window.scales.is_column_major)
      sync::write_shared(place, scales, static_cast<size_t>(params_.num_scales) * bytes);
    else
      for (int64_t block = 0; block < params_.num_scales; ++block, place += step)
        sync::write_shared(place, scales + block * params_.scale_bytes, bytes);
  }
}

void RowWriter::write_weights(int64_t token_idx, const int64_t* slots) const {
  const auto bytes = static_cast<size_t>(params_.weight_bytes);
  const std::byte* const weights =
      offset_ptr(params_.weights, token_idx * table_.num_topk, params_.weight_bytes);
  for (int64_t k = 0; k < table_.num_topk; ++k)
    if (slots[k] != Slot::kNone)
      sync::write_shared(base_of(slots[k]) + window_of(slots[k]).weights_offset +
                             Slot::row_idx(slots[k]) * params_.weight_bytes,
                         weights + k * params_.weight_bytes,
                         bytes);
}

/// Rank-major: all weights and ids of a token that belong to the receiver. A receiver's rows have
/// room for as many choices as any rank makes.
void RowWriter::write_choices(int64_t token_idx, const int64_t* slots) const {
  const auto weight_bytes = static_cast<size_t>(params_.weight_bytes);
  if (weight_bytes == 0 && !targets_.with_topk_idx)
    return;
  const auto& placement = endpoint_.placement();
  const int64_t num_topk = table_.num_topk;
  const int64_t* const choices = table_.topk_idx + token_idx * num_topk;
  const std::byte* const weights =
      offset_ptr(params_.weights, token_idx * num_topk, params_.weight_bytes);
  for (int64_t i = 0; i < table_.num_slots && slots[i] != Slot::kNone; ++i) {
    const int dst_rank = Slot::rank_idx(slots[i]);
    const auto& window = window_of(slots[i]);
    const int64_t first = Slot::row_idx(slots[i]) * table_.num_recv_topk;
    std::byte* const base = base_of(slots[i]);
    auto* const ids = reinterpret_cast<int64_t*>(base + window.topk_idx_offset) + first;
    for (int64_t k = 0; k < table_.num_recv_topk; ++k) {
      const int64_t expert_idx = k < num_topk ? choices[k] : -1;
      const bool is_there = expert_idx >= 0 && placement.expert_rank[expert_idx] == dst_rank;
      const int64_t local_idx = is_there ? placement.local_expert_idx[expert_idx] : -1;
      if (targets_.with_topk_idx)
        sync::write_shared(&ids[k], &local_idx, sizeof(local_idx));
      if (weight_bytes == 0)
        continue;
      std::byte* const place = base + window.weights_offset + (first + k) * params_.weight_bytes;
      if (is_there)
        sync::write_shared(place, weights + k * params_.weight_bytes, weight_bytes);
      else
        sync::fill_shared(place, 0, weight_bytes);
    }
  }
}

}  // namespace moe::ops
