#pragma once

#include <cstdint>

#include "device/primitives.h"
#include "device/warp.h"
#include "kernels/buffer.h"
#include "layout/capacity.h"
#include "layout/routing.h"

// The count matrix on the device: what layout/capacity.cpp and layout/routing.cpp compute with one
// thread, by all threads of one block. The numbers are the same.

namespace moe::kernels {

/// Shared memory that a CountBlock works in.
struct CountScratch {
  int64_t* words;      ///< one per warp
  int64_t* totals;     ///< [num_experts]
  int64_t* starts;     ///< [num_experts + 1]
  int32_t* is_masked;  ///< [num_ranks]
};

/// A count matrix in device memory and one block that works on it. Every function is called by all
/// threads and ends with a barrier, so that the next may read what it wrote.
///
/// Experts are taken in the order of Buffer::experts_by_rank; a position is an index there.
class CountBlock {
 public:
  MOE_DEVICE CountBlock(const Buffer& buffer,
                        const layout::Arrangement& arrangement,
                        int32_t* counts,
                        const CountScratch& scratch)
      : buffer_(buffer), arrangement_(arrangement), counts_(counts), scratch_(scratch) {}

  /// Makes the matrix what layout::keep_rows() says.
  /// @param num_dropped  gets how many choices of this rank's experts are not kept
  /// @return whether it has more rows than a limit that raises allows; it is then of no use.
  MOE_DEVICE bool keep_rows(const layout::CapacityRule& rule, int64_t* num_dropped) const {
    *num_dropped = 0;
    add_up_experts();
    if (is_low_latency()) {
      if (apply_masks()) {
        const int64_t num_asked = num_own_choices();
        forget_empty_streams();
        add_up_experts();
        *num_dropped = num_asked - num_own_choices();
      }
      if (exceeds_capacity(arrangement_.rows_per_expert))
        return true;
      lay_out_experts();
      return false;
    }
    lay_out_experts();
    if (rule.on_overflow == layout::OnOverflow::kDrop) {
      if (has_limits(rule)) {
        const int64_t num_asked = num_own_choices();
        drop_rows(rule);
        *num_dropped = num_asked - num_own_choices();
        forget_empty_streams();
        lay_out_experts();
      }
      return false;
    }
    if (rule.on_overflow == layout::OnOverflow::kRaise) {
      const bool is_over = exceeds_capacity(rule.expert_capacity);
      if (exceeds_fixed_rows() || is_over)
        return true;
    }
    grow_fixed_rows();
    return false;
  }

  /// Takes a matrix that is kept already.
  MOE_DEVICE void take_kept() const {
    add_up_experts();
    lay_out_experts();
  }

  MOE_DEVICE int64_t num_recv_topk() const {
    int64_t most = 0;
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      const int64_t num_topk = count(rank_idx, num_columns() - 1);
      most = num_topk > most ? num_topk : most;
    }
    return device::block_max(most, scratch_.words);
  }

  // --- By any thread, once the matrix is kept ---------------------------------------------------

  /// layout::num_window_rows().
  MOE_DEVICE int64_t num_window_rows(int rank_idx) const {
    const int64_t fixed_rows = count(rank_idx, fixed_column());
    return fixed_rows >= 0 && !is_low_latency() ? fixed_rows : num_required_rows(rank_idx);
  }

  MOE_DEVICE bool sends_rows(int src_rank, int dst_rank) const {
    return count(src_rank, buffer_.num_experts + dst_rank) > 0;
  }

  /// Writes the tables that do not depend on offers.
  MOE_DEVICE void fill(const Tables& tables, int64_t num_recv_topk) const {
    fill_stream_starts(tables.stream_starts);
    const int first = first_of_rank(buffer_.rank_idx);
#pragma unroll 1
    for (int i = device::thread_idx(); i <= buffer_.num_local_experts; i += device::num_threads()) {
      const int64_t start = padded_start(first + i, first);
      device::store(tables.expert_offsets + i, static_cast<int32_t>(start));
      if (i < buffer_.num_local_experts)
        device::store(tables.num_tokens_per_expert + i, device::load(scratch_.totals + first + i));
    }
    if (device::thread_idx() == 0) {
      device::store(tables.num_rows, num_window_rows(buffer_.rank_idx));
      device::store(tables.num_rows + 1, num_recv_topk);
    }
  }

 private:
  MOE_DEVICE bool is_low_latency() const {
    return arrangement_.layout == layout::RowLayout::kLowLatency;
  }
  MOE_DEVICE int num_columns() const {
    return layout::Row::num_counts(buffer_.num_ranks, buffer_.num_experts);
  }
  MOE_DEVICE int fixed_column() const { return buffer_.num_experts + buffer_.num_ranks; }
  MOE_DEVICE int32_t* at(int rank_idx, int column) const {
    return counts_ + int64_t{rank_idx} * num_columns() + column;
  }
  MOE_DEVICE int64_t count(int rank_idx, int column) const {
    return device::load(at(rank_idx, column));
  }
  MOE_DEVICE int expert_at(int position) const {
    return device::load_constant(buffer_.experts_by_rank + position);
  }
  MOE_DEVICE int first_of_rank(int rank_idx) const {
    return device::load_constant(buffer_.first_of_rank + rank_idx);
  }
  MOE_DEVICE int owner_at(int position) const {
    return device::load_constant(buffer_.expert_rank + expert_at(position));
  }
  /// Rows of the owner's window before those of the expert at @p position.
  MOE_DEVICE int64_t padded_start(int position, int first_of_owner) const {
    return device::load(scratch_.starts + position) -
           device::load(scratch_.starts + first_of_owner);
  }

  MOE_DEVICE int64_t num_required_rows(int rank_idx) const {
    if (!arrangement_.is_by_rank())
      return padded_start(first_of_rank(rank_idx + 1), first_of_rank(rank_idx));
    int64_t num_rows = 0;
#pragma unroll 1
    for (int src_rank = 0; src_rank < buffer_.num_ranks; ++src_rank)
      num_rows += count(src_rank, buffer_.num_experts + rank_idx);
    return num_rows;
  }

  /// Choices of this rank's experts, by all ranks, as `totals` has them.
  MOE_DEVICE int64_t num_own_choices() const {
    int64_t sum = 0;
    const int end = first_of_rank(buffer_.rank_idx + 1);
#pragma unroll 1
    for (int j = first_of_rank(buffer_.rank_idx) + device::thread_idx(); j < end;
         j += device::num_threads())
      sum += device::load(scratch_.totals + j);
    return device::block_sum(sum, scratch_.words);
  }

  /// totals: choices of every expert, by all ranks.
  MOE_DEVICE void add_up_experts() const {
#pragma unroll 1
    for (int j = device::thread_idx(); j < buffer_.num_experts; j += device::num_threads())
      device::store(scratch_.totals + j, sum_of_column(expert_at(j), buffer_.num_ranks));
    device::sync_block();
  }

  /// Choices of ranks below @p end_rank.
  MOE_DEVICE int64_t sum_of_column(int column, int end_rank) const {
    constexpr int kBatch = 4;
    int64_t sum = 0;
#pragma unroll 1
    for (int rank_idx = 0; rank_idx < end_rank; rank_idx += kBatch) {
      int64_t values[kBatch];
      for (int i = 0; i < kBatch; ++i)
        values[i] = rank_idx + i < end_rank ? count(rank_idx + i, column) : 0;
      for (int i = 0; i < kBatch; ++i)
        sum += values[i];
    }
    return sum;
  }

  /// starts: running sums of rows(position), over all ranks' experts.
  template <typename RowsAt>
  MOE_DEVICE void add_up_rows(const RowsAt& rows) const {
    int64_t before_tile = 0;
#pragma unroll 1
    for (int tile = 0; tile < buffer_.num_experts; tile += device::num_threads()) {
      const int j = tile + device::thread_idx();
      const int64_t num_rows = j < buffer_.num_experts ? rows(j) : 0;
      const auto sum = device::block_exclusive_sum(num_rows, scratch_.words);
      if (j < buffer_.num_experts)
        device::store(scratch_.starts + j, before_tile + sum.before);
      before_tile += sum.total;
    }
    if (device::thread_idx() == 0)
      device::store(scratch_.starts + buffer_.num_experts, before_tile);
    device::sync_block();
  }

  MOE_DEVICE void lay_out_experts() const {
    add_up_rows([this](int j) {
      const int64_t total = device::load(scratch_.totals + j);
      return arrangement_.expert_rows(total);
    });
  }

  MOE_DEVICE bool exceeds_capacity(int64_t limit) const {
    bool is_over = false;
#pragma unroll 1
    for (int j = device::thread_idx(); limit >= 0 && j < buffer_.num_experts;
         j += device::num_threads())
      is_over = is_over || device::load(scratch_.totals + j) > limit;
    return device::block_max<int64_t>(is_over ? 1 : 0, scratch_.words) != 0;
  }

  MOE_DEVICE bool exceeds_fixed_rows() const {
    bool is_over = false;
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      const int64_t fixed_rows = count(rank_idx, fixed_column());
      is_over = is_over || (fixed_rows >= 0 && num_required_rows(rank_idx) > fixed_rows);
    }
    return device::block_max<int64_t>(is_over ? 1 : 0, scratch_.words) != 0;
  }

  MOE_DEVICE bool has_limits(const layout::CapacityRule& rule) const {
    bool has_fixed_rows = false;
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads())
      has_fixed_rows = has_fixed_rows || count(rank_idx, fixed_column()) >= 0;
    return device::block_max<int64_t>(has_fixed_rows ? 1 : 0, scratch_.words) != 0 ||
           rule.expert_capacity >= 0;
  }

  MOE_DEVICE void grow_fixed_rows() const {
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      const int64_t fixed_rows = count(rank_idx, fixed_column());
      const int64_t num_rows = fixed_rows < 0 ? 0 : num_required_rows(rank_idx);
      if (fixed_rows >= 0 && num_rows > fixed_rows)
        device::store(at(rank_idx, fixed_column()), static_cast<int32_t>(num_rows));
    }
    device::sync_block();
  }

  /// Leaves the first @p limit rows of an expert, in order of source rank.
  MOE_DEVICE void clip_column(int column, int64_t limit) const {
#pragma unroll 1
    for (int src_rank = 0; src_rank < buffer_.num_ranks; ++src_rank) {
      const int64_t asked = count(src_rank, column);
      const int64_t kept = asked < limit ? asked : limit;
      if (kept < asked)
        device::store(at(src_rank, column), static_cast<int32_t>(kept));
      limit -= kept;
    }
  }

  /// No expert keeps more than its capacity, no rank more than its fixed rows hold.
  ///
  /// Which rows of an expert lie within its rank's fixed rows follows from the places before
  /// anything is dropped for that reason: the first expert that loses rows reaches the end, and so
  /// all experts behind it keep nothing.
  MOE_DEVICE void drop_rows(const layout::CapacityRule& rule) const {
    const auto within_capacity = [&](int j) {
      const int64_t total = device::load(scratch_.totals + j);
      return rule.expert_capacity >= 0 && total > rule.expert_capacity ? rule.expert_capacity
                                                                       : total;
    };
    add_up_rows([&](int j) {
      const int64_t kept = within_capacity(j);
      return arrangement_.expert_rows(kept);
    });
#pragma unroll 1
    for (int j = device::thread_idx(); j < buffer_.num_experts; j += device::num_threads()) {
      const int owner = owner_at(j);
      const int64_t fixed_rows = count(owner, fixed_column());
      int64_t kept = within_capacity(j);
      if (fixed_rows >= 0) {
        const int64_t start = padded_start(j, first_of_rank(owner));
        const int64_t room = fixed_rows > start ? fixed_rows - start : 0;
        kept = kept < room ? kept : room;
      }
      if (kept >= device::load(scratch_.totals + j))
        continue;
      clip_column(expert_at(j), kept);
      device::store(scratch_.totals + j, kept);
    }
    device::sync_block();
  }

  /// @return whether any rank is masked.
  MOE_DEVICE bool apply_masks() const {
    const int num_ranks = buffer_.num_ranks;
    bool any = false;
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < num_ranks;
         rank_idx += device::num_threads()) {
      bool is_masked = false;
#pragma unroll 1
      for (int src_rank = 0; src_rank < num_ranks; ++src_rank) {
        int32_t* const to_rank = at(src_rank, buffer_.num_experts + rank_idx);
        if (device::load(to_rank) != layout::CountMatrix::kMasked)
          continue;
        device::store(to_rank, int32_t{0});
        is_masked = true;
      }
      device::store(scratch_.is_masked + rank_idx, static_cast<int32_t>(is_masked));
      any = any || is_masked;
    }
    // Its barriers also make the masks known to all threads.
    if (device::block_max<int64_t>(any ? 1 : 0, scratch_.words) == 0)
      return false;
    // A rank that is masked asks for nothing; nobody asks for its experts.
    const int num_asked = buffer_.num_experts + num_ranks;
#pragma unroll 1
    for (int i = device::thread_idx(); i < num_ranks * num_asked; i += device::num_threads()) {
      const int src_rank = i / num_asked;
      const int column = i % num_asked;
      const bool is_expert = column < buffer_.num_experts;
      const int owner = is_expert ? device::load_constant(buffer_.expert_rank + column) : src_rank;
      if (device::load(scratch_.is_masked + src_rank) != 0 ||
          device::load(scratch_.is_masked + owner) != 0)
        device::store(at(src_rank, column), int32_t{0});
    }
    device::sync_block();
    return true;
  }

  /// No rank sends to a rank whose experts keep nothing of it.
  MOE_DEVICE void forget_empty_streams() const {
    const int num_ranks = buffer_.num_ranks;
#pragma unroll 1
    for (int i = device::thread_idx(); i < num_ranks * num_ranks; i += device::num_threads()) {
      const int src_rank = i / num_ranks;
      const int dst_rank = i % num_ranks;
      bool sends = false;
      const int end = first_of_rank(dst_rank + 1);
#pragma unroll 1
      for (int j = first_of_rank(dst_rank); j < end && !sends; ++j)
        sends = count(src_rank, expert_at(j)) > 0;
      if (!sends)
        device::store(at(src_rank, buffer_.num_experts + dst_rank), int32_t{0});
    }
    device::sync_block();
  }

  /// First row that this rank writes: for every rank (by rank), else for every expert.
  MOE_DEVICE void fill_stream_starts(int64_t* stream_starts) const {
    if (arrangement_.is_by_rank()) {
#pragma unroll 1
      for (int dst_rank = device::thread_idx(); dst_rank < buffer_.num_ranks;
           dst_rank += device::num_threads())
        device::store(stream_starts + dst_rank,
                      sum_of_column(buffer_.num_experts + dst_rank, buffer_.rank_idx));
      return;
    }
#pragma unroll 1
    for (int j = device::thread_idx(); j < buffer_.num_experts; j += device::num_threads()) {
      const int expert_idx = expert_at(j);
      const int64_t start = padded_start(j, first_of_rank(owner_at(j)));
      device::store(stream_starts + expert_idx,
                    start + sum_of_column(expert_idx, buffer_.rank_idx));
    }
  }

  const Buffer& buffer_;
  const layout::Arrangement& arrangement_;
  int32_t* counts_;
  CountScratch scratch_;
};

}  // namespace moe::kernels
