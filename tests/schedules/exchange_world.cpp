#include "schedules/exchange_world.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "device/primitives.h"
#include "kernels/finish.h"
#include "layout/control.h"
#include "simt/memory.h"

namespace moe::simt::checker {

namespace {

using kernels::HostRead;
using kernels::OperationStatus;
using layout::Row;
using layout::RowStatus;

struct MoveParams {
  kernels::Buffer buffer;
  kernels::Tables tables;
  layout::Operation operation = layout::Operation::kNone;
  uint64_t* const* mails = nullptr;  ///< device [num_ranks]: words of every rank
  uint64_t* num_wrong = nullptr;
  uint64_t letter = 0;  ///< combine: the word that peers pull
};

constexpr int kScratchBytes = 128;

int32_t* scratch() {
  return reinterpret_cast<int32_t*>(device::shared_memory());
}

/// Words of a mail are as long as what a bulk copy moves at least.
constexpr int kWordsPerMail = 2;

/// A dispatch that writes one word per block instead of rows, by bulk copy.
void write_words(MoveParams params) {
  if (device::load(params.tables.may_move) == 0)
    return;
  const uint64_t epoch = device::load(params.tables.epoch);
  auto* const staged = reinterpret_cast<uint64_t*>(device::shared_memory() + kScratchBytes) +
                       kWordsPerMail * device::thread_idx();
  for (int i = 0; i < kWordsPerMail; ++i)
    device::store(staged + i, epoch);
  // What is staged, and the letters that peers wrote where the words go.
  device::fence_proxy_async();
  for (int peer_rank = device::thread_idx(); peer_rank < params.buffer.num_ranks;
       peer_rank += device::num_threads())
    if (device::load(&params.tables.peers[peer_rank].is_sent_to) != 0) {
      const int mail = params.buffer.rank_idx * device::num_blocks() + device::block_idx();
      device::bulk_store(
          reinterpret_cast<std::byte*>(device::load_constant(params.mails + peer_rank) +
                                       kWordsPerMail * mail),
          reinterpret_cast<const std::byte*>(staged),
          8 * kWordsPerMail);
    }
  device::commit_bulk_stores();
  if (device::block_idx() == 0 && device::thread_idx() == 0)
    kernels::show_progress(params.buffer);
  kernels::finish(params.buffer, params.tables, params.operation, scratch());
}

/// Looks at the words that a dispatch has received.
void read_words(MoveParams params) {
  if (device::load(params.tables.may_move) == 0)
    return;
  const uint64_t epoch = device::load(params.tables.epoch);
  const uint64_t* const own = device::load_constant(params.mails + params.buffer.rank_idx);
  for (int i = device::thread_idx(); i < params.buffer.num_ranks * ExchangeWorld::kNumBlocks;
       i += device::num_threads())
    if (device::load(&params.tables.peers[i / ExchangeWorld::kNumBlocks].is_received_from) != 0 &&
        device::load(own + kWordsPerMail * i) != epoch)
      device::add_relaxed<device::Scope::kDevice>(params.num_wrong, uint64_t{1});
}

/// The word that a combine's peers pull, and once they have, its end.
void write_letter(MoveParams params) {
  if (device::thread_idx() == 0)
    device::store(device::load_constant(params.mails + params.buffer.rank_idx), params.letter);
}

/// A combine that pulls one word per block instead of rows.
void pull_words(MoveParams params) {
  if (device::load(params.tables.may_move) == 0)
    return;
  for (int peer_rank = device::thread_idx(); peer_rank < params.buffer.num_ranks;
       peer_rank += device::num_threads())
    if (device::load(&params.tables.peers[peer_rank].is_sent_to) != 0 &&
        device::load(device::load_constant(params.mails + peer_rank)) != params.letter)
      device::add_relaxed<device::Scope::kDevice>(params.num_wrong, uint64_t{1});
  kernels::finish(params.buffer, params.tables, params.operation, scratch());
}

}  // namespace

ExchangeWorld::ExchangeWorld(Run& run, ExchangeWorldShape shape)
    : run_(run), shape_(std::move(shape)), placement_(shape_.expert_rank, shape_.num_ranks) {
  const int num_ranks = shape_.num_ranks;
  const int num_experts = placement_.num_experts;
  std::vector<std::byte*> workspaces;
  std::vector<uint64_t*> mails;
  for (int rank_idx = 0; rank_idx < num_ranks; ++rank_idx) {
    workspaces.push_back(
        allocate<std::byte>(layout::Workspace::bytes(num_ranks, num_experts, shape_.depth),
                            Ownership::kHeap,
                            rank_idx,
                            "workspace"));
    mails.push_back(allocate<uint64_t>(
        num_ranks * kNumBlocks * kWordsPerMail, Ownership::kHeap, rank_idx, "mail"));
  }
  std::vector<int32_t> experts_by_rank;
  std::vector<int32_t> first_of_rank{0};
  for (const auto& owned : placement_.local_experts) {
    experts_by_rank.insert(experts_by_rank.end(), owned.begin(), owned.end());
    first_of_rank.push_back(static_cast<int32_t>(experts_by_rank.size()));
  }
  for (int rank_idx = 0; rank_idx < num_ranks; ++rank_idx) {
    ExchangeRank& own = ranks_.emplace_back();
    own.stream = std::make_unique<RankStream>(run_, rank_idx);
    own.mails = copy_of(mails, rank_idx, "mails");
    own.segment_bases = allocate<uint64_t>(
        num_ranks * kernels::Buffer::kMaxSegments, Ownership::kHost, rank_idx, "segment_bases");
    kernels::Buffer& buffer = own.buffer;
    buffer.rank_idx = rank_idx;
    buffer.num_ranks = num_ranks;
    buffer.num_experts = num_experts;
    buffer.num_local_experts =
        static_cast<int32_t>(placement_.local_experts[static_cast<size_t>(rank_idx)].size());
    buffer.depth = shape_.depth;
    buffer.workspaces = copy_of(workspaces, rank_idx, "workspaces");
    buffer.is_active = copy_of(shape_.is_active, rank_idx, "is_active");
    buffer.expert_rank = copy_of(placement_.expert_rank, rank_idx, "expert_rank");
    buffer.experts_by_rank = copy_of(experts_by_rank, rank_idx, "experts_by_rank");
    buffer.first_of_rank = copy_of(first_of_rank, rank_idx, "first_of_rank");
    buffer.state = allocate<kernels::BufferState>(1, Ownership::kDevice, rank_idx, "state");
    real(buffer.state).epoch = shape_.first_epoch - 1;
    buffer.report = allocate<kernels::WaitReport>(1, Ownership::kHost, rank_idx, "report");
    buffer.waits =
        allocate<kernels::WaitTotals>(num_ranks, Ownership::kHost, rank_idx, "wait totals");
    buffer.abort_word = allocate<uint32_t>(1, Ownership::kHost, rank_idx, "abort_word");
    buffer.abort_generation = 1;
    // An abort that a recovery has ended means nothing.
    real(const_cast<uint32_t*>(buffer.abort_word)) =
        layout::AbortRecord::word(0, layout::AbortRecord::kSet);
    buffer.stall_limit_ns = shape_.stall_limit_ns;
    buffer.arrival_limit_ns = shape_.arrival_limit_ns;
    buffer.first_epoch = shape_.first_epoch;
    buffer.segment_bases = own.segment_bases;
    buffer.found_bases = allocate<uint64_t>(
        num_ranks * kernels::Buffer::kMaxSegments, Ownership::kDevice, rank_idx, "found bases");
  }
}

std::byte* ExchangeWorld::address(int rank_idx, const Offer& offer) {
  // Nobody looks into windows here: their places are numbers.
  return reinterpret_cast<std::byte*>(
      (uint64_t{1} << 40) + static_cast<uint64_t>(rank_idx * kNumSegments) * kSegmentBytes +
      offer.segment_idx * uint64_t{kSegmentBytes} + offer.offset);
}

void ExchangeWorld::announce_segments() {
  for (int rank_idx = 0; rank_idx < shape_.num_ranks; ++rank_idx) {
    if (!is_active(rank_idx))
      continue;
    run_.start_host(rank_idx, "service", [this, rank_idx] {
      for (uint32_t segment_idx = 0; segment_idx < kNumSegments; ++segment_idx)
        for (int peer_rank = 0; peer_rank < shape_.num_ranks; ++peer_rank) {
          const Offer start{.segment_idx = segment_idx};
          uint64_t* const base = rank(rank_idx).segment_bases +
                                 peer_rank * kernels::Buffer::kMaxSegments + segment_idx;
          memory::atomic_store(base,
                               reinterpret_cast<uint64_t>(address(peer_rank, start)),
                               8,
                               Order::kRelease,
                               Reach::kSystem);
        }
    });
  }
}

ExchangeMemory ExchangeWorld::prepare(const ExchangeCase& expected, int rank_idx, uint64_t epoch) {
  const RankInput& input = expected.ranks[static_cast<size_t>(rank_idx)];
  ExchangeMemory memory;
  memory.epoch = epoch;
  kernels::ExchangeParams& params = memory.params;
  params.buffer = rank(rank_idx).buffer;
  params.tables = make_tables(rank_idx);
  params.arguments = input.arguments;
  params.status = static_cast<int32_t>(input.status);
  if (input.status != RowStatus::kOk) {
    auto* const message = allocate<char>(
        static_cast<int64_t>(input.message.size()) + 1, Ownership::kHost, rank_idx, "message");
    std::memcpy(&real(message), input.message.c_str(), input.message.size() + 1);
    params.message = message;
    params.needed_bytes = 1000;
    params.available_bytes = 10;
  }
  params.num_tokens = static_cast<int32_t>(input.num_tokens());
  params.num_topk = static_cast<int32_t>(input.num_topk);
  params.fixed_rows = static_cast<int32_t>(input.fixed_rows);
  params.is_dispatch = static_cast<int32_t>(expected.is_dispatch());
  params.with_counts = static_cast<int32_t>(expected.is_counted());
  params.rule = expected.rule;
  params.arrangement = expected.arrangement;
  params.is_column_major = static_cast<int32_t>(expected.is_column_major);
  params.with_topk_idx = static_cast<int32_t>(expected.with_topk_idx);
  if (!expected.is_counted())
    params.kept_counts =
        copy_of(expected.kept.counts.empty() ? expected.asked.counts : expected.kept.counts,
                rank_idx,
                "kept_counts");
  params.choices = make_choices(expected, rank_idx);
  if (expected.arrangement.layout == layout::RowLayout::kLowLatency)
    params.is_masked = copy_of(input.is_masked, rank_idx, "is_masked");

  const auto segment_idx = static_cast<uint32_t>(epoch % kNumSegments);
  auto& [offer, second_offer] = offers_of(epoch)[static_cast<size_t>(rank_idx)];
  offer =
      Offer{.segment_idx = segment_idx, .offset = 64 * (epoch % 7), .bytes = input.offered_bytes};
  second_offer = Offer{
      .segment_idx = (segment_idx + 1) % kNumSegments, .offset = 128, .bytes = input.second_bytes};
  params.offer = offer;
  params.weights_offer = Offer{.segment_idx = 0, .offset = 4096, .bytes = 64};
  if (expected.has_host_read)
    make_host_reads(expected, rank_idx, second_offer, &memory);
  memory.num_wrong = allocate<uint64_t>(1, Ownership::kDevice, rank_idx, "num_wrong");
  return memory;
}

kernels::Tables ExchangeWorld::make_tables(int rank_idx) {
  const int num_ranks = shape_.num_ranks;
  const int num_experts = placement_.num_experts;
  const int num_local_experts = rank(rank_idx).buffer.num_local_experts;
  kernels::Tables tables;
  make(tables.epoch, rank_idx, 1, "epoch");
  make(tables.may_move, rank_idx, 1, "may_move");
  make(tables.peers, rank_idx, num_ranks, "peers");
  make(tables.counts,
       rank_idx,
       int64_t{num_ranks} * Row::num_counts(num_ranks, num_experts),
       "counts");
  make(tables.stream_starts, rank_idx, std::max(num_ranks, num_experts), "stream_starts");
  make(tables.num_rows, rank_idx, 2, "num_rows");
  make(tables.num_tokens_per_expert, rank_idx, num_local_experts, "tokens_per_expert");
  make(tables.expert_offsets, rank_idx, num_local_experts + 1, "expert_offsets");
  make(tables.status, rank_idx, 2, "status");
  return tables;
}

kernels::Choices ExchangeWorld::make_choices(const ExchangeCase& expected, int rank_idx) {
  const RankInput& input = expected.ranks[static_cast<size_t>(rank_idx)];
  const int num_columns = placement_.num_experts + shape_.num_ranks;
  kernels::Choices choices;
  choices.asked_idx = copy_of(input.topk_idx, rank_idx, "topk_idx");
  make(choices.topk_idx, rank_idx, static_cast<int64_t>(input.topk_idx.size()), "copy of topk_idx");
  choices.num_tokens = input.num_tokens();
  choices.num_topk = static_cast<int32_t>(input.num_topk);
  choices.num_slots = static_cast<int32_t>(
      layout::num_slots_per_token(expected.arrangement.layout, input.num_topk, shape_.num_ranks));
  choices.is_by_rank = static_cast<int32_t>(expected.arrangement.is_by_rank());
  choices.tokens_per_chunk = input.tokens_per_chunk;
  choices.num_chunks = static_cast<int32_t>((input.num_tokens() + input.tokens_per_chunk - 1) /
                                            input.tokens_per_chunk);
  make(choices.chunk_counts, rank_idx, int64_t{choices.num_chunks} * num_columns, "chunk_counts");
  make(choices.place_in_chunk, rank_idx, input.num_tokens() * choices.num_slots, "place_in_chunk");
  make(choices.bad_choice, rank_idx, choices.num_chunks, "bad_choice");
  return choices;
}

/// Places where the host of a rank reads rows and second offers, and its own offer.
void ExchangeWorld::make_host_reads(const ExchangeCase& expected,
                                    int rank_idx,
                                    const Offer& second_offer,
                                    ExchangeMemory* memory) {
  const int num_ranks = shape_.num_ranks;
  const int64_t bytes = 64 + num_ranks * Row::stride(num_ranks, placement_.num_experts);
  memory->host_read = reinterpret_cast<HostRead*>(
      allocate<std::byte>(bytes, Ownership::kHost, rank_idx, "host_read"));
  memory->second_host_read = reinterpret_cast<HostRead*>(
      allocate<std::byte>(64 + num_ranks * 64, Ownership::kHost, rank_idx, "second_host_read"));
  memory->params.host_read = memory->host_read;
  memory->params.ticket = memory->epoch * 10;
  kernels::OffersParams& offers = memory->offers;
  offers.buffer = memory->params.buffer;
  offers.tables = memory->params.tables;
  offers.own.offer = second_offer;
  offers.own.needed_bytes = second_offer.bytes + 1;
  offers.own.available_bytes = second_offer.bytes;
  if (!expected.is_short.empty()) {
    offers.is_short = expected.is_short[static_cast<size_t>(rank_idx)];
    offers.short_ranks = copy_of(expected.is_short, rank_idx, "short_ranks");
  }
  offers.host_read = memory->second_host_read;
  offers.ticket = memory->epoch * 10 + 1;
}

void ExchangeWorld::launch(const ExchangeCase& expected,
                           int rank_idx,
                           ExchangeMemory& memory,
                           int num_threads) {
  ExchangeRank& own = rank(rank_idx);
  device::Launch shape;
  shape.stream = static_cast<simt::Stream*>(own.stream.get());
  shape.num_threads = num_threads;
  const kernels::ExchangeParams& params = memory.params;
  MoveParams move{
      params.buffer, params.tables, expected.operation, own.mails, memory.num_wrong, memory.epoch};
  device::Launch move_shape = shape;
  move_shape.num_threads = 32;
  move_shape.shared_bytes = kScratchBytes + 8 * kWordsPerMail * 32;
  if (!expected.is_dispatch())
    device::launch(write_letter, move_shape, move);
  shape.num_blocks = params.choices.num_chunks > 2 ? params.choices.num_chunks - 1 : 1;
  kernels::launch_exchange(shape, params);
  if (expected.has_host_read) {
    await_host_read(rank_idx, memory.host_read, params.ticket, memory.epoch, expected.first_status);
    if (expected.first_status == OperationStatus::kShort) {
      pause_(rank_idx, layout::Phase::kOffers);
      kernels::launch_offers(shape, memory.offers);
      await_host_read(rank_idx,
                      memory.second_host_read,
                      memory.offers.ticket,
                      memory.epoch,
                      expected.last_status);
    }
  }
  pause_(rank_idx, layout::Phase::kData);
  move_shape.num_blocks = kNumBlocks;
  device::launch(expected.is_dispatch() ? write_words : pull_words, move_shape, move);
  move_shape.num_blocks = 1;
  if (expected.is_dispatch())
    device::launch(read_words, move_shape, move);
}

void ExchangeWorld::await_host_read(
    int rank_idx, HostRead* host_read, uint64_t ticket, uint64_t epoch, OperationStatus status) {
  const auto has_come = [&] {
    return memory::atomic_load(&host_read->ticket, 8, Order::kAcquire, Reach::kSystem) == ticket;
  };
  while (!has_come())
    run_.scheduler().idle(100);
  uint64_t found_epoch = 0;
  int32_t found_status = 0;
  memory::load(&host_read->epoch, &found_epoch, 8);
  memory::load(&host_read->status, &found_status, 4);
  expect("HostRead.epoch", rank_idx, epoch, epoch, found_epoch);
  expect("HostRead.status", rank_idx, epoch, static_cast<int32_t>(status), found_status);
  // No peer waits until a store has reached this host.
  for (int peer_rank = 0; peer_rank < shape_.num_ranks; ++peer_rank) {
    if (!is_active(peer_rank))
      continue;
    const layout::Workspace peer = rank(peer_rank).buffer.workspace(
        real(const_cast<std::byte**>(rank(rank_idx).buffer.workspaces) + peer_rank));
    if (run_.machine().is_behind(&peer.row(epoch, rank_idx).epoch, &host_read->epoch))
      run_.report(Kind::kResult,
                  concat("the row flag of rank ",
                         rank_idx,
                         " at rank ",
                         peer_rank,
                         " in epoch ",
                         epoch,
                         " waits for a store into the memory of its host"));
  }
}

}  // namespace moe::simt::checker
