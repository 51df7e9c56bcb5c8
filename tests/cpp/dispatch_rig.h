#pragma once

// All ranks of one small dispatch in one process: what the exchange would have found, the kernels
// of every rank on the emulator, and the windows that the definition makes of the same rows.

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "cpu/row_kernels.h"
#include "kernels/dispatch.h"
#include "layout/capacity.h"
#include "layout/routing.h"
#include "layout/window.h"
#include "schedules/spec.h"
#include "simt/grid.h"

namespace moe::dispatch_rig {

using kernels::DispatchParams;
using layout::RowLayout;
using layout::Slot;
using simt::checker::AskedOfRank;
using simt::checker::DispatchSpec;

constexpr uint8_t kUntouched = 0xEE;

struct Case {
  std::string name;
  int num_ranks = 2;
  int num_experts = 5;
  std::vector<int> num_tokens = {3, 5};  ///< by rank
  int num_topk = 2;
  RowLayout layout = RowLayout::kExpertMajor;
  int64_t expert_alignment = 1;
  int64_t source_row_bytes = 48;
  int64_t row_bytes = 48;
  int weight_bytes = 4;
  kernels::Quantize quantize;
  int num_scales = 0;
  int scale_bytes = 0;
  bool is_column_major = false;
  bool is_cached = false;
  bool is_plain = false;
  bool is_misaligned = false;  ///< x begins off a multiple of 16
  int64_t fixed_rows = -1;
  layout::CapacityRule rule;
  int num_blocks = 2;
  int num_threads = 64;
};

/// Memory of a given alignment, and nothing behind its end.
class Memory {
 public:
  explicit Memory(int64_t bytes, uint8_t fill = kUntouched, int64_t offset = 0)
      : storage_(static_cast<size_t>(bytes + 256), std::byte{fill}) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    data_ = storage_.data() +
            (round_up(static_cast<int64_t>(address), 64) - static_cast<int64_t>(address)) + offset;
  }
  std::byte* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  mutable std::vector<std::byte> storage_;
  std::byte* data_ = nullptr;
};

template <typename T>
Memory copy_of(const std::vector<T>& values, int64_t offset = 0) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  Memory memory(bytes, kUntouched, offset);
  if (bytes > 0)
    std::memcpy(memory.data(), values.data(), static_cast<size_t>(bytes));
  return memory;
}

/// Memory of one rank's kernel.
class Owned {
 public:
  std::byte* add(Memory memory) {
    memory_.push_back(std::move(memory));
    return memory_.back().data();
  }
  template <typename Value>
  Value* table(const std::vector<Value>& values, int64_t offset = 0) {
    return reinterpret_cast<Value*>(add(copy_of(values, offset)));
  }

 private:
  std::vector<Memory> memory_;
};

/// Runs grids of all ranks beside each other.
class RankStream : public simt::Stream {
 public:
  RankStream(simt::Scheduler& scheduler, int rank_idx)
      : scheduler_(scheduler), rank_idx_(rank_idx) {}
  void launch(simt::Kernel kernel) override {
    kernel.rank_idx = rank_idx_;
    simt::launch_grid(scheduler_, std::move(kernel));
  }

 private:
  simt::Scheduler& scheduler_;
  int rank_idx_;
};

inline void check(bool condition, const std::string& message) {
  if (!condition)
    throw std::runtime_error(message);
}

/// Elements of all sizes of magnitude, with blocks that are zero, tiny or not finite.
inline std::vector<std::byte> random_rows(std::mt19937& random, int64_t bytes, DType dtype) {
  std::vector<std::byte> rows(static_cast<size_t>(bytes));
  for (auto& value : rows)
    value = static_cast<std::byte>(random());
  const int64_t element = element_bytes(dtype);
  const auto set = [&](int64_t first, int64_t num_elements, uint32_t bits) {
    for (int64_t i = first; i < first + num_elements && (i + 1) * element <= bytes; ++i)
      std::memcpy(rows.data() + i * element, &bits, static_cast<size_t>(element));
  };
  // Random bits hold a NaN or an infinity in most long blocks: clear some exponents.
  for (int64_t i = 0; dtype != DType::kBytes && (i + 1) * element <= bytes; ++i) {
    if (random() % 300 == 0)
      continue;
    auto& high = rows[static_cast<size_t>(i * element + element - 1)];
    high &= std::byte{static_cast<uint8_t>(random() % 2 ? 0xBF : 0xB7)};
  }
  if (dtype != DType::kBytes) {
    set(0, 32, 0);
    set(64, 40, 1);  // the least subnormal
  }
  return rows;
}

class Rig {
 public:
  Rig(const Case& test, uint32_t seed)
      : test_(test), random_(seed), placement_(expert_rank(), test.num_ranks) {
    arrangement_.layout = test.layout;
    arrangement_.expert_alignment = test.expert_alignment;
    if (test.layout == RowLayout::kLowLatency)
      arrangement_.rows_per_expert =
          test.num_ranks * *std::max_element(test.num_tokens.begin(), test.num_tokens.end()) *
          test.num_topk;
    route();
    for (int rank_idx = 0; rank_idx < test.num_ranks; ++rank_idx) {
      lay_out_window(rank_idx);
      workspaces_.emplace_back(layout::Workspace::bytes(test.num_ranks, test.num_experts, kDepth),
                               0);
      workspace_bases_.push_back(workspaces_.back().data());
    }
  }

  void run() {
    simt::Scheduler scheduler;
    for (int rank_idx = 0; rank_idx < test_.num_ranks; ++rank_idx)
      launch(scheduler, rank_idx);
    scheduler.run();
    for (int rank_idx = 0; rank_idx < test_.num_ranks; ++rank_idx)
      check_rank(rank_idx);
  }

 private:
  static constexpr int kDepth = 2;
  static constexpr uint64_t kEpoch = 7;

  std::vector<int32_t> expert_rank() {
    std::vector<int32_t> ranks(static_cast<size_t>(test_.num_experts));
    for (auto& rank_idx : ranks)
      rank_idx = static_cast<int32_t>(random_() % static_cast<uint32_t>(test_.num_ranks));
    return ranks;
  }

  int64_t num_slots() const {
    return layout::num_slots_per_token(test_.layout, test_.num_topk, test_.num_ranks);
  }
  int64_t num_recv_topk() const { return test_.num_topk + 1; }  // another rank makes more choices
  bool is_by_rank() const { return arrangement_.is_by_rank(); }
  bool with_topk_idx() const { return is_by_rank() && !test_.is_cached; }

  void route() {
    for (int rank_idx = 0; rank_idx < test_.num_ranks; ++rank_idx) {
      const int num_tokens = test_.num_tokens[static_cast<size_t>(rank_idx)];
      std::vector<int64_t> choices(static_cast<size_t>(num_tokens * test_.num_topk));
      for (auto& expert_idx : choices)
        expert_idx =
            static_cast<int64_t>(random_() % static_cast<uint32_t>(test_.num_experts + 2)) -
            (random_() % 4 == 0 ? 2 : 0);
      for (auto& expert_idx : choices)
        expert_idx = expert_idx < 0 || expert_idx >= test_.num_experts ? -1 : expert_idx;
      topk_idx_.push_back(std::move(choices));
    }
    std::vector<AskedOfRank> asked;
    for (const auto& choices : topk_idx_)
      asked.push_back({choices, test_.num_topk, {}, test_.fixed_rows});
    spec_ = std::make_unique<DispatchSpec>(
        arrangement_, test_.rule, placement_.expert_rank, std::move(asked));
    kept_ = spec_->counts();
    for (int rank_idx = 0; rank_idx < test_.num_ranks; ++rank_idx)
      kept_.row(rank_idx)[test_.num_experts + test_.num_ranks + 1] =
          static_cast<int32_t>(num_recv_topk());
  }

  void lay_out_window(int rank_idx) {
    const int64_t num_rows = spec_->received(rank_idx).num_rows;
    const auto scales = layout::ScaleMap::make(test_.layout,
                                               num_rows,
                                               arrangement_.rows_per_expert,
                                               test_.num_scales,
                                               test_.scale_bytes,
                                               test_.is_column_major);
    const auto window = layout::ReceiveWindow::make(test_.layout,
                                                    num_rows,
                                                    test_.row_bytes,
                                                    scales,
                                                    test_.weight_bytes,
                                                    num_recv_topk(),
                                                    with_topk_idx(),
                                                    false);
    num_rows_.push_back(num_rows);
    windows_.push_back(window);
    received_.emplace_back(window.bytes);
    expected_.emplace_back(window.bytes);
    zero_padding(rank_idx);
  }

  void zero_padding(int rank_idx) {
    if (test_.layout == RowLayout::kLowLatency)
      return;
    const auto& rows = spec_->rows(rank_idx);
    for (int64_t row_idx = 0; row_idx < std::ssize(rows); ++row_idx)
      if (rows[static_cast<size_t>(row_idx)].is_nothing())
        put_row(rank_idx, row_idx, nullptr, nullptr, nullptr, nullptr);
  }

  /// Writes one row of the expected window; null stands for padding.
  void put_row(int rank_idx,
               int64_t row_idx,
               const std::byte* data,
               const std::byte* scales,
               const std::byte* weights,
               const int64_t* ids) {
    std::byte* const base = expected_[static_cast<size_t>(rank_idx)].data();
    const auto& window = windows_[static_cast<size_t>(rank_idx)];
    const auto put = [](std::byte* to, const void* from, int64_t bytes, int otherwise) {
      if (bytes == 0)
        return;
      if (from != nullptr)
        std::memcpy(to, from, static_cast<size_t>(bytes));
      else
        std::memset(to, otherwise, static_cast<size_t>(bytes));
    };
    put(base + row_idx * test_.row_bytes, data, test_.row_bytes, 0);
    for (int64_t i = 0; i < test_.num_scales; ++i)
      put(base + window.scales_offset + window.scales.place(row_idx) + i * window.scales.step(),
          scales == nullptr ? nullptr : scales + i * test_.scale_bytes,
          test_.scale_bytes,
          0);
    const int64_t per_row = is_by_rank() ? num_recv_topk() : 1;
    put(base + window.weights_offset + row_idx * per_row * test_.weight_bytes,
        weights,
        per_row * test_.weight_bytes,
        0);
    if (with_topk_idx())
      put(base + window.topk_idx_offset + row_idx * per_row * 8, ids, per_row * 8, -1);
  }

  void launch(simt::Scheduler& scheduler, int rank_idx) {
    const auto rank = static_cast<size_t>(rank_idx);
    const int64_t num_tokens = test_.num_tokens[rank];
    auto owned = std::make_shared<Owned>();
    owned_.push_back(owned);
    DispatchParams params;
    fill_buffer(rank_idx, *owned, &params.buffer);
    fill_tables(rank_idx, *owned, &params.tables);
    std::vector<int64_t> slots = spec_->slots(rank_idx);
    params.is_cached = test_.is_cached;
    params.slots =
        owned->table(test_.is_cached ? slots : std::vector<int64_t>(slots.size(), 12345));
    fill_choices(rank_idx, *owned, &params.choices);
    const DType dtype = test_.quantize.is_on ? test_.quantize.dtype : DType::kBytes;
    const auto rows = random_rows(random_, num_tokens * test_.source_row_bytes, dtype);
    params.x = reinterpret_cast<std::byte*>(
        owned->table(rows, test_.is_misaligned ? std::max<int64_t>(element_bytes(dtype), 1) : 0));
    params.source_row_bytes = test_.source_row_bytes;
    params.row_bytes = test_.row_bytes;
    const auto weights =
        random_rows(random_, num_tokens * test_.num_topk * test_.weight_bytes, DType::kBytes);
    params.weights = owned->table(weights);
    params.weight_bytes = test_.weight_bytes;
    params.quantize = test_.quantize;
    params.num_scales = test_.num_scales;
    params.scale_bytes = test_.scale_bytes;
    // Scale factors of pairs lie in a matrix with other columns between them.
    params.scale_step = 3 * test_.scale_bytes;
    params.scale_row_stride = test_.num_scales * params.scale_step + 2 * test_.scale_bytes;
    const auto scales = random_rows(random_, num_tokens * params.scale_row_stride, DType::kBytes);
    params.scales = owned->table(scales);
    params.arrangement = arrangement_;
    params.with_topk_idx = with_topk_idx();
    params.is_plain = test_.is_plain;
    device::Launch launch;
    launch.num_blocks = test_.num_blocks;
    launch.num_threads = test_.num_threads;
    params.num_parts = kernels::num_row_parts(launch, params);

    expect(rank_idx, slots, rows, weights, scales, params);
    launch.shared_bytes = kernels::dispatch_shared_bytes(params, test_.num_threads);
    auto stream = std::make_shared<RankStream>(scheduler, rank_idx);
    scheduler.keep(stream);
    launch.stream = static_cast<simt::Stream*>(stream.get());
    kernels::launch_dispatch(launch, params);
    written_slots_.push_back(params.slots);
    expected_slots_.push_back(std::move(slots));
  }

  void fill_buffer(int rank_idx, Owned& owned, kernels::Buffer* buffer) {
    std::vector<int32_t> by_rank;
    std::vector<int32_t> first_of_rank = {0};
    for (const auto& experts : placement_.local_experts) {
      by_rank.insert(by_rank.end(), experts.begin(), experts.end());
      first_of_rank.push_back(static_cast<int32_t>(by_rank.size()));
    }
    buffer->rank_idx = rank_idx;
    buffer->num_ranks = test_.num_ranks;
    buffer->num_experts = test_.num_experts;
    buffer->num_local_experts =
        static_cast<int>(placement_.local_experts[static_cast<size_t>(rank_idx)].size());
    buffer->depth = kDepth;
    buffer->workspaces = owned.table(workspace_bases_);
    buffer->is_active = owned.table(std::vector<uint8_t>(static_cast<size_t>(test_.num_ranks), 1));
    buffer->expert_rank = owned.table(placement_.expert_rank);
    buffer->experts_by_rank = owned.table(by_rank);
    buffer->first_of_rank = owned.table(first_of_rank);
    states_.push_back(owned.add(Memory(sizeof(kernels::BufferState), 0)));
    buffer->state = reinterpret_cast<kernels::BufferState*>(states_.back());
    buffer->report =
        reinterpret_cast<kernels::WaitReport*>(owned.add(Memory(sizeof(kernels::WaitReport), 0)));
    buffer->abort_word = reinterpret_cast<uint32_t*>(owned.add(Memory(4, 0)));
    buffer->stall_limit_ns = buffer->arrival_limit_ns = 60'000'000'000;
  }

  /// Counts that the exchange leaves of all ranks.
  void fill_tables(int rank_idx, Owned& owned, kernels::Tables* tables) {
    std::vector<kernels::Peer> peers(static_cast<size_t>(test_.num_ranks));
    for (int peer_rank = 0; peer_rank < test_.num_ranks; ++peer_rank) {
      auto& peer = peers[static_cast<size_t>(peer_rank)];
      peer.is_sent_to = kept_.to_rank(rank_idx, peer_rank) > 0;
      peer.is_received_from = kept_.to_rank(peer_rank, rank_idx) > 0;
      if (peer.is_sent_to || peer_rank == rank_idx)
        peer.rows = received_[static_cast<size_t>(peer_rank)].data();
      peer.window = windows_[static_cast<size_t>(peer_rank)];
    }
    const auto received = spec_->received(rank_idx);
    tables->epoch = owned.table(std::vector<uint64_t>{kEpoch});
    tables->may_move = owned.table(std::vector<int32_t>{1});
    tables->peers = owned.table(peers);
    tables->counts = owned.table(kept_.counts);
    tables->stream_starts = owned.table(spec_->stream_starts(rank_idx));
    tables->num_rows = owned.table(
        std::vector<int64_t>{num_rows_[static_cast<size_t>(rank_idx)], num_recv_topk()});
    tables->num_tokens_per_expert = owned.table(received.num_tokens_per_expert);
    tables->expert_offsets = owned.table(
        std::vector<int32_t>(received.expert_offsets.begin(), received.expert_offsets.end()));
    tables->status = owned.table(std::vector<int32_t>{0, 0});
  }

  void fill_choices(int rank_idx, Owned& owned, kernels::Choices* choices) {
    choices->num_tokens = test_.num_tokens[static_cast<size_t>(rank_idx)];
    choices->num_topk = test_.num_topk;
    choices->num_slots = static_cast<int32_t>(num_slots());
    choices->is_by_rank = is_by_rank();
    choices->topk_idx = owned.table(topk_idx_[static_cast<size_t>(rank_idx)]);
    if (test_.is_cached)
      return;
    std::vector<int32_t> chunk_counts;
    std::vector<int32_t> places;
    count_chunks(rank_idx, choices, &chunk_counts, &places);
    choices->chunk_counts = owned.table(chunk_counts);
    choices->place_in_chunk = owned.table(places);
  }

  /// State that the exchange leaves.
  void count_chunks(int rank_idx,
                    kernels::Choices* choices,
                    std::vector<int32_t>* chunk_counts,
                    std::vector<int32_t>* places) const {
    const auto num_columns = static_cast<size_t>(test_.num_experts + test_.num_ranks);
    const auto& topk_idx = topk_idx_[static_cast<size_t>(rank_idx)];
    choices->tokens_per_chunk = 2;
    choices->num_chunks = static_cast<int32_t>((choices->num_tokens + 1) / 2);
    std::vector<int32_t> before(num_columns);
    std::vector<int32_t> at_start;
    places->assign(static_cast<size_t>(choices->num_tokens * choices->num_slots), -1);
    for (int64_t token_idx = 0; token_idx < choices->num_tokens; ++token_idx) {
      if (token_idx % 2 == 0) {
        at_start = before;
        chunk_counts->insert(chunk_counts->end(), before.begin(), before.end());
      }
      std::vector<size_t> columns;
      std::vector<bool> is_bound(static_cast<size_t>(test_.num_ranks));
      for (int k = 0; k < test_.num_topk; ++k) {
        const int64_t expert_idx = topk_idx[static_cast<size_t>(token_idx * test_.num_topk + k)];
        if (expert_idx >= 0)
          is_bound[static_cast<size_t>(placement_.expert_rank[static_cast<size_t>(expert_idx)])] =
              true;
        if (!is_by_rank())
          columns.push_back(expert_idx < 0 ? num_columns : static_cast<size_t>(expert_idx));
      }
      for (size_t dst_rank = 0; is_by_rank() && dst_rank < is_bound.size(); ++dst_rank)
        if (is_bound[dst_rank])
          columns.push_back(static_cast<size_t>(test_.num_experts) + dst_rank);
      for (size_t i = 0; i < columns.size(); ++i)
        if (columns[i] < num_columns)
          (*places)[static_cast<size_t>(token_idx * choices->num_slots) + i] =
              before[columns[i]]++ - at_start[columns[i]];
    }
  }

  void expect(int rank_idx,
              const std::vector<int64_t>& slots,
              const std::vector<std::byte>& rows,
              const std::vector<std::byte>& weights,
              const std::vector<std::byte>& scales,
              const DispatchParams& params) {
    const auto rank = static_cast<size_t>(rank_idx);
    const auto weight_bytes = static_cast<size_t>(test_.weight_bytes);
    std::vector<std::byte> data(static_cast<size_t>(test_.row_bytes));
    std::vector<std::byte> factors(static_cast<size_t>(test_.num_scales * test_.scale_bytes));
    const cpu::FloatingPointScope scope;
    for (int64_t token_idx = 0; token_idx < params.choices.num_tokens; ++token_idx) {
      const std::byte* const row = rows.data() + token_idx * test_.source_row_bytes;
      if (test_.quantize.is_on) {
        const kernels::Quantize& how = test_.quantize;
        const cpu::RowQuantization quantization{
            how.dtype, how.block, how.least_amax, how.scale_format, test_.row_bytes};
        std::fill(factors.begin(), factors.end(), std::byte{0});
        std::byte* place = data.data();
        cpu::find_row_kernels("portable")
            ->quantize_row(quantization, row, &place, 1, factors.data(), cpu::StoreMode::kCached);
      } else {
        std::memcpy(data.data(), row, data.size());
        for (int64_t i = 0; i < test_.num_scales; ++i)
          std::memcpy(factors.data() + i * test_.scale_bytes,
                      scales.data() + token_idx * params.scale_row_stride + i * params.scale_step,
                      static_cast<size_t>(test_.scale_bytes));
      }
      for (int64_t i = 0; i < num_slots(); ++i) {
        const int64_t slot = slots[static_cast<size_t>(token_idx * num_slots() + i)];
        if (slot == Slot::kNone)
          continue;
        const int dst_rank = Slot::rank_idx(slot);
        std::vector<int64_t> ids(static_cast<size_t>(num_recv_topk()), -1);
        std::vector<std::byte> own(ids.size() * weight_bytes);
        for (int64_t k = 0; k < test_.num_topk; ++k) {
          const size_t choice = static_cast<size_t>(token_idx * test_.num_topk + k);
          const int64_t expert_idx = topk_idx_[rank][choice];
          if (is_by_rank()) {
            if (expert_idx < 0 ||
                placement_.expert_rank[static_cast<size_t>(expert_idx)] != dst_rank)
              continue;
            ids[static_cast<size_t>(k)] =
                placement_.local_expert_idx[static_cast<size_t>(expert_idx)];
            std::memcpy(own.data() + static_cast<size_t>(k) * weight_bytes,
                        weights.data() + choice * weight_bytes,
                        weight_bytes);
          } else if (k == i) {
            std::memcpy(own.data(), weights.data() + choice * weight_bytes, weight_bytes);
          }
        }
        put_row(dst_rank, Slot::row_idx(slot), data.data(), factors.data(), own.data(), ids.data());
      }
    }
  }

  void check_rank(int rank_idx) const {
    const auto rank = static_cast<size_t>(rank_idx);
    const std::byte* const seen = received_[rank].data();
    const std::byte* const wanted = expected_[rank].data();
    const auto bytes = static_cast<size_t>(windows_[rank].bytes);
    const auto place = static_cast<size_t>(std::mismatch(seen, seen + bytes, wanted).first - seen);
    if (place != bytes)
      throw std::runtime_error(concat("window of rank ",
                                      rank_idx,
                                      ": byte ",
                                      place,
                                      " of ",
                                      bytes,
                                      " (rows end at ",
                                      num_rows_[rank] * test_.row_bytes,
                                      ") is ",
                                      static_cast<int>(seen[place]),
                                      ", wanted ",
                                      static_cast<int>(wanted[place])));
    const auto& slots = expected_slots_[rank];
    check(std::equal(slots.begin(), slots.end(), written_slots_[rank]),
          concat("slots of rank ", rank_idx, " are others than assign_slots gives"));
    const auto* const state = reinterpret_cast<const kernels::BufferState*>(states_[rank]);
    check(state->num_blocks_done == 0, "num_blocks_done was not reset");
    for (int peer_rank = 0; peer_rank < test_.num_ranks; ++peer_rank) {
      const layout::Workspace workspace(
          workspace_bases_[rank], test_.num_ranks, test_.num_experts, kDepth);
      check(workspace.done(kEpoch, peer_rank).epoch == kEpoch,
            concat("rank ", peer_rank, " raised no done flag on rank ", rank_idx));
    }
  }

  const Case& test_;
  std::mt19937 random_;
  layout::Placement placement_;
  layout::Arrangement arrangement_;
  std::unique_ptr<const DispatchSpec> spec_;
  layout::CountMatrix kept_;
  std::vector<std::vector<int64_t>> topk_idx_;
  std::vector<int64_t> num_rows_;
  std::vector<layout::ReceiveWindow> windows_;
  std::vector<Memory> received_;
  std::vector<Memory> expected_;
  std::vector<Memory> workspaces_;
  std::vector<std::byte*> workspace_bases_;
  std::vector<std::byte*> states_;
  std::vector<std::shared_ptr<Owned>> owned_;
  std::vector<int64_t*> written_slots_;
  std::vector<std::vector<int64_t>> expected_slots_;
};

}  // namespace moe::dispatch_rig
