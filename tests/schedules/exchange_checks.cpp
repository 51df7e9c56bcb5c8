#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "schedules/exchange_world.h"

// What an exchange left on a rank, held to the spec.

namespace moe::simt::checker {

using kernels::OperationStatus;
using layout::Row;
using layout::RowStatus;

template <typename T>
void ExchangeWorld::expect(
    const std::string& what, int rank_idx, uint64_t epoch, T expected, T found) {
  if (found != expected)
    run_.report(Kind::kResult,
                concat(what,
                       " of rank ",
                       rank_idx,
                       " in epoch ",
                       epoch,
                       ": expected ",
                       expected,
                       ", found ",
                       found));
}

template void ExchangeWorld::expect(const std::string&, int, uint64_t, uint64_t, uint64_t);
template void ExchangeWorld::expect(const std::string&, int, uint64_t, int32_t, int32_t);

void ExchangeWorld::check(const ExchangeCase& expected,
                          int rank_idx,
                          const ExchangeMemory& memory) {
  const kernels::Tables& tables = memory.params.tables;
  const uint64_t epoch = memory.epoch;
  if (!expected.difference_of_layout.empty())
    run_.report(Kind::kResult, expected.difference_of_layout);
  expect("epoch", rank_idx, epoch, epoch, real(tables.epoch));
  expect(
      "status", rank_idx, epoch, static_cast<int32_t>(expected.last_status), real(tables.status));
  expect("may_move",
         rank_idx,
         epoch,
         int32_t{expected.last_status == OperationStatus::kOk},
         real(tables.may_move));
  expect("num_wrong", rank_idx, epoch, uint64_t{0}, real(memory.num_wrong));
  if (memory.host_read != nullptr)
    check_host_rows(expected, rank_idx, memory);
  if (expected.first_status == OperationStatus::kRejected ||
      expected.first_status == OperationStatus::kOverflow)
    return;
  check_peers(expected, rank_idx, memory);
  if (!expected.is_dispatch())
    return;
  check_tables(expected, rank_idx, memory);
  if (expected.is_counted())
    check_slots(expected, rank_idx, memory);
}

void ExchangeWorld::check_tables(const ExchangeCase& expected,
                                 int rank_idx,
                                 const ExchangeMemory& memory) {
  const kernels::Tables& tables = memory.params.tables;
  const uint64_t epoch = memory.epoch;
  for (size_t i = 0; i < expected.kept.counts.size(); ++i)
    expect(concat("count ", i), rank_idx, epoch, expected.kept.counts[i], real(tables.counts + i));
  const auto starts = expected.spec->stream_starts(rank_idx);
  for (size_t i = 0; i < starts.size(); ++i)
    expect(concat("stream_start ", i), rank_idx, epoch, starts[i], real(tables.stream_starts + i));
  const auto received = expected.spec->received(rank_idx);
  expect("num_rows", rank_idx, epoch, received.num_rows, real(tables.num_rows));
  expect(
      "num_recv_topk", rank_idx, epoch, expected.kept.num_recv_topk(), real(tables.num_rows + 1));
  int64_t num_dropped = 0;
  const auto& owned = placement_.local_experts[static_cast<size_t>(rank_idx)];
  for (size_t i = 0; i < owned.size(); ++i) {
    expect(concat("num_tokens_per_expert ", i),
           rank_idx,
           epoch,
           received.num_tokens_per_expert[i],
           real(tables.num_tokens_per_expert + i));
    num_dropped += expected.asked.to_expert(owned[i]) - received.num_tokens_per_expert[i];
  }
  for (size_t i = 0; i <= owned.size(); ++i)
    expect(concat("expert_offset ", i),
           rank_idx,
           epoch,
           static_cast<int32_t>(received.expert_offsets[i]),
           real(tables.expert_offsets + i));
  expect("dropped rows",
         rank_idx,
         epoch,
         static_cast<int32_t>(expected.is_counted() ? num_dropped : 0),
         real(tables.status + 1));
}

void ExchangeWorld::check_peers(const ExchangeCase& expected,
                                int rank_idx,
                                const ExchangeMemory& memory) {
  const uint64_t epoch = memory.epoch;
  const auto place_of = [](const std::byte* place) { return reinterpret_cast<uint64_t>(place); };
  for (int peer_rank = 0; peer_rank < shape_.num_ranks; ++peer_rank) {
    const kernels::Peer& peer = real(memory.params.tables.peers + peer_rank);
    const std::string name = concat("peer ", peer_rank);
    const bool is_sent_to = expected.kept.to_rank(rank_idx, peer_rank) > 0;
    expect(name + " is_sent_to", rank_idx, epoch, int32_t{is_sent_to}, peer.is_sent_to);
    expect(name + " is_received_from",
           rank_idx,
           epoch,
           int32_t{expected.kept.to_rank(peer_rank, rank_idx) > 0},
           peer.is_received_from);
    const Offer weights{.segment_idx = 0, .offset = 4096};
    std::byte* rows = nullptr;
    if (expected.is_dispatch()) {
      const auto& window = expected.windows[static_cast<size_t>(peer_rank)];
      const bool is_equal = peer.window.bytes == window.bytes &&
                            peer.window.scales_offset == window.scales_offset &&
                            peer.window.weights_offset == window.weights_offset &&
                            peer.window.topk_idx_offset == window.topk_idx_offset &&
                            peer.window.scales.group_stride == window.scales.group_stride &&
                            peer.window.scales.group_rows == window.scales.group_rows &&
                            peer.window.scales.is_column_major == window.scales.is_column_major;
      expect(name + " window is right", rank_idx, epoch, int32_t{1}, int32_t{is_equal});
      const auto& input = expected.ranks[static_cast<size_t>(peer_rank)];
      const bool is_short = expected.is_short[static_cast<size_t>(peer_rank)] != 0;
      Offer offer = offers_of(epoch)[static_cast<size_t>(peer_rank)].first;
      if (is_short && expected.has_host_read && input.second_bytes > 0)
        offer = offers_of(epoch)[static_cast<size_t>(peer_rank)].second;
      const bool has_room = !is_short || (expected.has_host_read && input.second_bytes > 0);
      if (is_active(peer_rank) && has_room &&
          (is_sent_to || (peer_rank == rank_idx && window.bytes > 0)))
        rows = address(peer_rank, offer);
    } else if (is_sent_to && is_active(peer_rank)) {
      rows = address(peer_rank, offers_of(epoch)[static_cast<size_t>(peer_rank)].first);
      expect(name + " weights",
             rank_idx,
             epoch,
             place_of(address(peer_rank, weights)),
             place_of(peer.weights));
    }
    expect(name + " rows", rank_idx, epoch, place_of(rows), place_of(peer.rows));
  }
}

void ExchangeWorld::check_slots(const ExchangeCase& expected,
                                int rank_idx,
                                const ExchangeMemory& memory) {
  const kernels::Choices& choices = memory.params.choices;
  const RankInput& input = expected.ranks[static_cast<size_t>(rank_idx)];
  const bool is_by_rank = expected.arrangement.is_by_rank();
  const auto num_slots = static_cast<size_t>(choices.num_slots);
  const std::vector<int64_t> slots = expected.spec->slots(rank_idx);
  const int num_columns = placement_.num_experts + shape_.num_ranks;
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto token_idx = static_cast<int64_t>(i / num_slots);
    const int64_t chunk_idx = token_idx / choices.tokens_per_chunk;
    const int32_t place = real(choices.place_in_chunk + i);
    int64_t found = layout::Slot::kNone;
    if (is_by_rank && place >= 0 && slots[i] != layout::Slot::kNone) {
      const int dst_rank = layout::Slot::rank_idx(slots[i]);
      const int column = placement_.num_experts + dst_rank;
      found = layout::Slot::pack(dst_rank,
                                 real(memory.params.tables.stream_starts + dst_rank) + place +
                                     real(choices.chunk_counts + chunk_idx * num_columns + column));
    } else if (!is_by_rank && place >= 0) {
      const int64_t expert_idx = input.topk_idx[i];
      const int64_t before =
          place + real(choices.chunk_counts + chunk_idx * num_columns + expert_idx);
      if (before < expected.kept.to_expert(rank_idx, static_cast<int>(expert_idx)))
        found = layout::Slot::pack(placement_.expert_rank[static_cast<size_t>(expert_idx)],
                                   real(memory.params.tables.stream_starts + expert_idx) + before);
    }
    expect(concat("slot ", i), rank_idx, memory.epoch, slots[i], found);
  }
}

void ExchangeWorld::check_host_rows(const ExchangeCase& expected,
                                    int rank_idx,
                                    const ExchangeMemory& memory) {
  const int64_t stride = Row::stride(shape_.num_ranks, placement_.num_experts);
  std::byte* const rows = run_.guest().real(memory.host_read + 1);
  for (int peer_rank = 0; peer_rank < shape_.num_ranks; ++peer_rank) {
    Row row;
    std::memcpy(&row, rows + peer_rank * stride, sizeof(row));
    const std::string name = concat("row ", peer_rank);
    if (!is_active(peer_rank)) {
      expect(name + " epoch", rank_idx, memory.epoch, uint64_t{0}, row.epoch);
      continue;
    }
    const RankInput& input = expected.ranks[static_cast<size_t>(peer_rank)];
    const auto status = expected.row_status[static_cast<size_t>(peer_rank)];
    expect(name + " epoch", rank_idx, memory.epoch, memory.epoch, row.epoch);
    expect(name + " status", rank_idx, memory.epoch, static_cast<int32_t>(status), row.status);
    expect(name + " num_tokens",
           rank_idx,
           memory.epoch,
           static_cast<int32_t>(input.num_tokens()),
           row.num_tokens);
    expect(name + " arguments",
           rank_idx,
           memory.epoch,
           int32_t{1},
           int32_t{row.arguments == input.arguments});
    const std::byte* const tail = rows + peer_rank * stride + sizeof(Row);
    if (status == RowStatus::kBadExpert || status == RowStatus::kFailedRank)
      expect(name + " needed_bytes",
             rank_idx,
             memory.epoch,
             static_cast<uint64_t>(expected.bad_value[static_cast<size_t>(peer_rank)]),
             row.needed_bytes);
    else if (status != RowStatus::kOk)
      expect(name + " message is right",
             rank_idx,
             memory.epoch,
             int32_t{1},
             int32_t{input.message == reinterpret_cast<const char*>(tail)});
    else if (expected.is_counted())
      expect(name + " counts are right",
             rank_idx,
             memory.epoch,
             int32_t{1},
             int32_t{std::memcmp(tail,
                                 expected.asked.row(peer_rank),
                                 static_cast<size_t>(expected.asked.stride()) * 4) == 0});
  }
  if (expected.first_status != OperationStatus::kShort)
    return;
  auto* const seconds =
      reinterpret_cast<layout::SecondOffer*>(run_.guest().real(memory.second_host_read + 1));
  for (int peer_rank = 0; peer_rank < shape_.num_ranks; ++peer_rank) {
    const bool is_short = expected.is_short[static_cast<size_t>(peer_rank)] != 0;
    const uint64_t bytes =
        is_short ? expected.ranks[static_cast<size_t>(peer_rank)].second_bytes : 0;
    const std::string name = concat("second offer ", peer_rank);
    expect(name, rank_idx, memory.epoch, bytes, seconds[peer_rank].offer.bytes);
    expect(name + " needed_bytes",
           rank_idx,
           memory.epoch,
           is_short ? bytes + 1 : 0,
           seconds[peer_rank].needed_bytes);
  }
}

}  // namespace moe::simt::checker
