// What a KernelWorld compares after its operations, and how they end.

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "schedules/kernel_world.h"
#include "simt/memory.h"

namespace moe::simt::checker {

template <typename T>
void KernelWorld::expect_equal(const T& got, const T& expected, const std::string& what) {
  if (got != expected)
    run_.report(Kind::kResult, concat(what, ": ", expected, " is right, got ", got));
}
template void KernelWorld::expect_equal(const bool&, const bool&, const std::string&);
template void KernelWorld::expect_equal(const int&, const int&, const std::string&);
template void KernelWorld::expect_equal(const int64_t&, const int64_t&, const std::string&);
template void KernelWorld::expect_equal(const uint64_t&, const uint64_t&, const std::string&);

void KernelWorld::compare(const std::byte* from,
                          const ExpectedBytes& expected,
                          const std::string& what) {
  constexpr int64_t kUnit = 16;
  const auto num_bytes = static_cast<int64_t>(expected.bytes.size());
  const auto differs_at = [&](int64_t offset, const std::byte* got) {
    if (got[0] == expected.bytes[static_cast<size_t>(offset)])
      return false;
    run_.report(Kind::kResult,
                concat(what,
                       ": byte ",
                       offset,
                       " at ",
                       run_.guest().describe(from + offset),
                       " is to be ",
                       static_cast<int>(expected.bytes[static_cast<size_t>(offset)]),
                       ", got ",
                       static_cast<int>(got[0])));
    return true;
  };
  for (int64_t offset = 0; offset < num_bytes; offset += kUnit) {
    const int64_t end = std::min(offset + kUnit, num_bytes);
    const auto first = expected.is_defined.begin() + offset;
    const bool is_whole =
        end - offset == kUnit && std::find(first, first + kUnit, 0) == first + kUnit;
    std::byte unit[kUnit];
    if (is_whole)
      memory::load(from + offset, unit, kUnit);
    for (int64_t i = offset; i < end; ++i) {
      if (expected.is_defined[static_cast<size_t>(i)] == 0)
        continue;
      if (!is_whole)
        memory::load(from + i, unit + (i - offset), 1);
      if (differs_at(i, unit + (i - offset)))
        return;
    }
  }
}

void KernelWorld::overwrite(std::byte* to, int64_t bytes) {
  constexpr int64_t kUnit = 16;
  std::byte poison[kUnit];
  std::memset(poison, 0xEE, sizeof(poison));
  for (int64_t offset = 0; offset + kUnit <= bytes; offset += kUnit)
    memory::store(to + offset, poison, kUnit);
}

void KernelWorld::check_tables(int rank_idx, const Step& step, uint64_t epoch, bool is_cached) {
  const kernels::Tables& tables = rank(rank_idx).tables;
  if (!step.difference_of_layout.empty())
    run_.report(Kind::kResult, step.difference_of_layout);
  expect_equal(read(tables.status), static_cast<int32_t>(step.status), "status of a dispatch");
  expect_equal(read(tables.epoch), epoch, "epoch of a dispatch");
  expect_equal(static_cast<int>(read(&rank(rank_idx).buffer.state->num_blocks_done)),
               0,
               "blocks still counted when the kernel has ended");
  if (step.status != kernels::OperationStatus::kOk)
    return;
  const ExpectedDispatch& expected = step.dispatched[static_cast<size_t>(rank_idx)];
  expect_equal(read(tables.num_rows), expected.received.num_rows, "rows of the window");
  expect_equal(read(tables.num_rows + 1), step.num_recv_topk, "choices a row has room for");
  for (size_t e = 0; e < expected.received.num_tokens_per_expert.size(); ++e)
    expect_equal(read(tables.num_tokens_per_expert + e),
                 expected.received.num_tokens_per_expert[e],
                 concat("tokens of local expert ", e));
  for (size_t e = 0; !shape_.is_by_rank() && e < expected.received.expert_offsets.size(); ++e)
    expect_equal(int64_t{read(tables.expert_offsets + e)},
                 expected.received.expert_offsets[e],
                 concat("offset of local expert ", e));
  if (is_cached)
    return;
  for (size_t i = 0; i < step.kept.counts.size(); ++i)
    expect_equal(int{read(tables.counts + i)}, int{step.kept.counts[i]}, concat("count ", i));
}

void KernelWorld::check(int rank_idx, const Step& step, const Sent& sent) {
  ++num_checks_due_;
  rank(rank_idx).stream->call("check of a dispatch", [this, rank_idx, &step, sent] {
    check_tables(rank_idx, step, sent.epoch, false);
    check_dispatch(rank_idx, step, sent.segment_idx, sent.handle.slots);
    const std::vector<int64_t>& chosen = step.inputs[static_cast<size_t>(rank_idx)].topk_idx;
    for (size_t i = 0; step.status == kernels::OperationStatus::kOk && i < chosen.size(); ++i)
      expect_equal(read(sent.handle.topk_idx + i), chosen[i], concat("kept choice ", i));
  });
  count_traffic(rank_idx, step, false, true);
  count_puts(rank_idx, step, layout::Operation::kDispatch, false);
}

void KernelWorld::check_dispatch(int rank_idx,
                                 const Step& step,
                                 int segment_idx,
                                 const int64_t* slots) {
  ++num_checks_made_;
  if (step.status != kernels::OperationStatus::kOk)
    return;
  const ExpectedDispatch& expected = step.dispatched[static_cast<size_t>(rank_idx)];
  const Segment window = rank(rank_idx).segments[static_cast<size_t>(segment_idx)];
  compare(window.base, expected.bytes, "window");
  for (size_t i = 0; i < expected.slots.size(); ++i)
    expect_equal(read(slots + i), expected.slots[i], concat("slot ", i));
  // What was received is its owner's to write over.
  overwrite(window.base, expected.window.bytes / 16 * 16);
}

void KernelWorld::overwrite_window(int rank_idx, const Step& step, int segment_idx) {
  rank(rank_idx).stream->call("writing over a window", [this, rank_idx, &step, segment_idx] {
    const int64_t bytes = step.dispatched[static_cast<size_t>(rank_idx)].window.bytes;
    overwrite(rank(rank_idx).segments[static_cast<size_t>(segment_idx)].base, bytes / 16 * 16);
  });
}

void KernelWorld::abort(int rank_idx) {
  memory::atomic_store(&rank(rank_idx).abort->state,
                       layout::AbortRecord::word(0, layout::AbortRecord::kSet),
                       4,
                       Order::kRelease,
                       Reach::kSystem);
}

void KernelWorld::run_all() {
  run_.scheduler().run();
  if (num_checks_made_ != num_checks_due_)
    run_.report(Kind::kResult,
                concat(num_checks_due_, " checks were due, ", num_checks_made_, " were made"));
  for (int rank_idx = 0; rank_idx < shape_.num_ranks; ++rank_idx) {
    kernels::WaitReport report;
    std::memcpy(&report, run_.guest().real(rank(rank_idx).buffer.report), sizeof(report));
    if (report.cause != 0)
      run_.report(Kind::kResult,
                  concat("rank ",
                         rank_idx,
                         " left with cause ",
                         report.cause,
                         " while it waited for rank ",
                         report.peer_rank,
                         " in phase ",
                         report.phase));
  }
}

void KernelWorld::run_until_left(kernels::Cause cause, int missing_rank) {
  run_.scheduler().run();
  for (int rank_idx = 0; rank_idx < shape_.num_ranks; ++rank_idx) {
    kernels::WaitReport report;
    std::memcpy(&report, run_.guest().real(rank(rank_idx).buffer.report), sizeof(report));
    if (rank_idx == missing_rank)
      continue;
    if (report.cause != static_cast<uint32_t>(cause) ||
        (cause == kernels::Cause::kTimedOut && report.peer_rank != missing_rank))
      run_.report(Kind::kResult,
                  concat("rank ",
                         rank_idx,
                         " is to leave with cause ",
                         static_cast<uint32_t>(cause),
                         " for rank ",
                         missing_rank,
                         ", got cause ",
                         report.cause,
                         " for rank ",
                         report.peer_rank));
  }
}

/// A row and its scale factors cross once for each rank of another device that its token goes to;
/// its weight, and the word that says whose copy a row is, once for each slot.
void KernelWorld::count_crossing(int rank_idx, const ExpectedDispatch& expected) {
  const int64_t row_bytes = shape_.row_bytes() + shape_.num_scales() * shape_.scale_bytes();
  const int64_t slot_bytes = (shape_.has_origins() ? 4 : 0) + (shape_.with_weights ? 4 : 0);
  for (size_t first = 0; first < expected.slots.size();
       first += static_cast<size_t>(expected.num_slots)) {
    const int64_t* const slots = expected.slots.data() + first;
    for (int64_t i = 0; i < expected.num_slots; ++i) {
      if (slots[i] == layout::Slot::kNone ||
          !shape_.is_elsewhere(rank_idx, layout::Slot::rank_idx(slots[i])))
        continue;
      const bool is_copy = shape_.origin_of(rank_idx, slots, i) != layout::Slot::row_idx(slots[i]);
      traffic_.window_stored_across += slot_bytes + (is_copy ? 0 : row_bytes);
      traffic_.window_loaded += is_copy ? row_bytes : 0;
    }
  }
  // Of every row that is there the receiver looks at the word.
  const bool is_low_latency = shape_.layout == layout::RowLayout::kLowLatency;
  int64_t num_rows = is_low_latency ? 0 : expected.received.num_rows;
  for (const int64_t num_tokens : expected.received.num_tokens_per_expert)
    num_rows += is_low_latency ? num_tokens : 0;
  traffic_.window_loaded += shape_.has_origins() ? 4 * num_rows : 0;
  // It finds them by the number of every expert, which each thread passes once, however many places
  // there are. The host looks at each.
  const int64_t num_threads = int64_t{shape_.num_blocks} * shape_.num_threads;
  const auto num_experts = static_cast<int64_t>(expected.received.num_tokens_per_expert.size());
  if (is_low_latency && shape_.has_origins())
    traffic_.counts_loaded += 8 * ((num_threads + 1) * num_experts + num_rows);
}

/// Of a token's rows on a rank of another device each crosses; where ranks add first their sum
/// alone, or a row that is alone, and before it, to every such rank, all slots and the weights of
/// those there. What each rank says of itself crosses once for each thread, and where its rows lie
/// once.
void KernelWorld::count_pulled_across(int rank_idx,
                                      const ExpectedDispatch& expected,
                                      bool is_weighted) {
  const auto num_slots = static_cast<size_t>(expected.num_slots);
  for (int other_rank = 0; other_rank < shape_.num_ranks; ++other_rank) {
    if (!shape_.is_elsewhere(rank_idx, other_rank))
      continue;
    int64_t num_rows = 0;
    int64_t num_tokens = 0;
    int64_t num_alone = 0;
    for (size_t first = 0; first < expected.slots.size(); first += num_slots) {
      const auto begin = expected.slots.begin() + static_cast<ptrdiff_t>(first);
      const auto num_there =
          std::count_if(begin, begin + static_cast<ptrdiff_t>(num_slots), [&](int64_t slot) {
            return slot != layout::Slot::kNone && layout::Slot::rank_idx(slot) == other_rank;
          });
      num_rows += num_there;
      num_tokens += num_there > 0;
      num_alone += num_there == 1;
    }
    if (!shape_.adds_by_rank()) {
      traffic_.outputs_loaded_across += num_rows * shape_.source_row_bytes();
      continue;
    }
    if (num_rows == 0)
      continue;
    if (!shape_.offers_rows || is_weighted)
      num_alone = 0;
    traffic_.outputs_loaded_across += num_alone * shape_.source_row_bytes();
    const int64_t header_bytes = int64_t{shape_.num_blocks} * shape_.num_threads * 24 + 24;
    const auto slot_bytes = static_cast<int64_t>(expected.slots.size()) * 8;
    traffic_.sums_loaded_across += (num_tokens - num_alone) * shape_.source_row_bytes() +
                                   header_bytes + slot_bytes + num_rows * 4;
  }
}

void KernelWorld::count_traffic(int rank_idx, const Step& step, bool is_combine, bool is_dispatch) {
  if (step.status != kernels::OperationStatus::kOk)
    return;
  const ExpectedDispatch& expected = step.dispatched[static_cast<size_t>(rank_idx)];
  const int64_t num_tokens = step.inputs[static_cast<size_t>(rank_idx)].num_tokens();
  int64_t num_rows = 0;
  int64_t num_sent_tokens = 0;
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx) {
    int64_t num_slots = 0;
    for (int64_t i = 0; i < expected.num_slots; ++i)
      num_slots += expected.slots[static_cast<size_t>(token_idx * expected.num_slots + i)] >= 0;
    num_rows += num_slots;
    num_sent_tokens += num_slots > 0;
  }
  if (is_dispatch) {
    traffic_.x_loaded += num_sent_tokens * shape_.source_row_bytes();
    const auto& is_defined = expected.bytes.is_defined;
    const auto num_defined = std::count(is_defined.begin(), is_defined.end(), uint8_t{1});
    traffic_.window_stored += num_defined + expected.window.bytes / 16 * 16;
    traffic_.window_loaded += num_defined;
    if (!shape_.is_by_rank() && !has_nodes())
      count_crossing(rank_idx, expected);
  }
  if (is_combine) {
    traffic_.outputs_loaded += num_rows * shape_.source_row_bytes();
    traffic_.sums_stored += num_tokens * shape_.source_row_bytes();
  }
}

}  // namespace moe::simt::checker
