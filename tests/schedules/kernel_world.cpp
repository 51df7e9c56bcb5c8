#include "schedules/kernel_world.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "kernels/internode_combine.h"
#include "kernels/internode_dispatch.h"
#include "kernels/internode_exchange.h"
#include "kernels/receive.h"
#include "layout/token_sets.h"
#include "simt/memory.h"

namespace moe::simt::checker {

namespace {

constexpr int64_t kTokensPerChunk = 2;

int64_t num_chunks(int64_t num_tokens) {
  return std::max<int64_t>(1, (num_tokens + kTokensPerChunk - 1) / kTokensPerChunk);
}

}  // namespace

// --- Memory ------------------------------------------------------------------------------------

std::byte* KernelWorld::put_bytes(
    int rank_idx, Ownership ownership, const std::string& name, const void* from, int64_t bytes) {
  std::byte* const place = run_.guest().allocate(bytes, ownership, rank_idx, name, true);
  if (bytes > 0)
    std::memcpy(run_.guest().real(place), from, static_cast<size_t>(bytes));
  return place;
}

int KernelWorld::add_segment(int rank_idx, std::byte* base, int64_t bytes) {
  auto& segments = rank(rank_idx).segments;
  segments.push_back({base, bytes});
  const size_t segment_idx = segments.size() - 1;
  if (segments.size() > static_cast<size_t>(kernels::Buffer::kMaxSegments))
    throw std::length_error("a case has more windows than a rank may have segments");
  for (uint64_t* const bases : segment_bases_) {
    const size_t place =
        static_cast<size_t>(rank_idx) * kernels::Buffer::kMaxSegments + segment_idx;
    const auto address = reinterpret_cast<uint64_t>(base);
    std::memcpy(run_.guest().real(bases + place), &address, sizeof(address));
  }
  return static_cast<int>(segment_idx);
}

Offer KernelWorld::offer_of(int rank_idx, int segment_idx, int64_t bytes) {
  Offer offer;
  offer.segment_idx = static_cast<uint32_t>(segment_idx);
  const int64_t most = rank(rank_idx).segments[static_cast<size_t>(segment_idx)].bytes;
  offer.bytes = static_cast<uint64_t>(bytes < 0 ? most : bytes);
  return offer;
}

int64_t KernelWorld::most_window_bytes() const {
  const int64_t num_choices = shape_.num_ranks * shape_.num_max_tokens * shape_.num_topk;
  int64_t num_rows = num_choices + shape_.num_experts * shape_.expert_alignment;
  if (shape_.layout == layout::RowLayout::kLowLatency)
    num_rows = std::max(num_rows, shape_.num_experts * shape_.arrangement().rows_per_expert);
  const auto scales = layout::ScaleMap::make(shape_.layout,
                                             num_rows,
                                             shape_.arrangement().rows_per_expert,
                                             shape_.num_scales(),
                                             shape_.scale_bytes(),
                                             shape_.is_column_major);
  return layout::ReceiveWindow::make(
             shape_.layout, num_rows, shape_.row_bytes(), scales, 4, shape_.num_topk, true, true)
             .bytes +
         256;
}

KernelWorld::KernelWorld(Run& run, const KernelCase& shape)
    : run_(run),
      shape_(shape),
      placement_(draw_placement(shape, &run.random())),
      ranks_(static_cast<size_t>(shape.num_ranks)) {
  for (int rank_idx = 0; rank_idx < shape_.num_ranks; ++rank_idx) {
    rank(rank_idx).workspace = zeros<std::byte>(
        rank_idx,
        Ownership::kHeap,
        "workspace",
        layout::Workspace::bytes(shape_.num_ranks, shape_.num_experts, shape_.depth));
    segment_bases_.push_back(
        zeros<uint64_t>(rank_idx,
                        Ownership::kHost,
                        "segment bases",
                        int64_t{shape_.num_ranks} * kernels::Buffer::kMaxSegments));
  }
  for (int rank_idx = 0; rank_idx < shape_.num_ranks; ++rank_idx)
    make_rank(rank_idx);
  run_.guest().set_devices(shape_.num_devices);
  if (has_nodes())
    make_rails();
}

void KernelWorld::make_rank(int rank_idx) {
  Rank& own = rank(rank_idx);
  own.stream = std::make_unique<RankStream>(run_, rank_idx);
  std::vector<std::byte*> workspaces;
  for (int peer_rank = 0; peer_rank < shape_.num_ranks; ++peer_rank) {
    const bool is_near =
        !has_nodes() ||
        NodeLayout{shape_.num_ranks, shape_.num_local_ranks}.is_same_node(rank_idx, peer_rank);
    workspaces.push_back(
        is_near ? rank(peer_rank).workspace
                : zeros<std::byte>(rank_idx,
                                   Ownership::kDevice,
                                   "mirror of a workspace",
                                   layout::Workspace::bytes(
                                       shape_.num_ranks, shape_.num_experts, shape_.depth)));
  }
  std::vector<int32_t> experts_by_rank;
  std::vector<int32_t> first_of_rank = {0};
  for (const auto& owned : placement_.local_experts) {
    experts_by_rank.insert(experts_by_rank.end(), owned.begin(), owned.end());
    first_of_rank.push_back(static_cast<int32_t>(experts_by_rank.size()));
  }
  own.abort = zeros<layout::AbortRecord>(rank_idx, Ownership::kHeap, "abort record", 1);
  kernels::Buffer& buffer = own.buffer;
  buffer.rank_idx = rank_idx;
  buffer.num_ranks = shape_.num_ranks;
  buffer.num_experts = shape_.num_experts;
  buffer.num_local_experts =
      static_cast<int32_t>(placement_.local_experts[static_cast<size_t>(rank_idx)].size());
  buffer.depth = shape_.depth;
  buffer.workspaces = put(rank_idx, Ownership::kDevice, "workspaces", workspaces);
  buffer.is_active = put(rank_idx,
                         Ownership::kDevice,
                         "is_active",
                         std::vector<uint8_t>(static_cast<size_t>(shape_.num_ranks), 1));
  std::vector<uint8_t> is_elsewhere;
  for (int peer_rank = 0; peer_rank < shape_.num_ranks; ++peer_rank)
    is_elsewhere.push_back(shape_.is_elsewhere(rank_idx, peer_rank) ? 1 : 0);
  buffer.is_elsewhere = put(rank_idx, Ownership::kDevice, "is_elsewhere", is_elsewhere);
  buffer.expert_rank = put(rank_idx, Ownership::kDevice, "expert_rank", placement_.expert_rank);
  buffer.experts_by_rank = put(rank_idx, Ownership::kDevice, "experts_by_rank", experts_by_rank);
  buffer.first_of_rank = put(rank_idx, Ownership::kDevice, "first_of_rank", first_of_rank);
  buffer.state = zeros<kernels::BufferState>(rank_idx, Ownership::kDevice, "buffer state", 1);
  buffer.report = zeros<kernels::WaitReport>(rank_idx, Ownership::kHost, "wait report", 1);
  buffer.waits =
      zeros<kernels::WaitTotals>(rank_idx, Ownership::kHost, "wait totals", shape_.num_ranks);
  buffer.abort_word = &own.abort->state;
  buffer.stall_limit_ns = kStallLimitNs;
  buffer.arrival_limit_ns = kArrivalLimitNs;
  buffer.segment_bases = segment_bases_[static_cast<size_t>(rank_idx)];
  buffer.found_bases = zeros<uint64_t>(rank_idx,
                                       Ownership::kDevice,
                                       "found bases",
                                       int64_t{shape_.num_ranks} * kernels::Buffer::kMaxSegments);
  for (int i = 0; i < kNumWindows; ++i) {
    const int64_t bytes = most_window_bytes();
    add_segment(rank_idx,
                unwritten<std::byte>(rank_idx, Ownership::kHeap, concat("window ", i), bytes),
                bytes);
  }
  make_tables(rank_idx);
}

void KernelWorld::make_tables(int rank_idx) {
  Rank& own = rank(rank_idx);
  const int num_ranks = shape_.num_ranks;
  const int num_experts = shape_.num_experts;
  const auto make = [&](auto* to, const char* name, int64_t count) {
    *to = unwritten<std::remove_reference_t<decltype(**to)>>(
        rank_idx, Ownership::kDevice, name, std::max<int64_t>(count, 1));
  };
  kernels::Tables& tables = own.tables;
  make(&tables.epoch, "table of the epoch", 1);
  make(&tables.may_move, "may_move", 1);
  make(&tables.peers, "peers", 2 * num_ranks);
  make(&tables.counts, "counts", num_ranks * layout::Row::num_counts(num_ranks, num_experts));
  make(&tables.stream_starts, "stream_starts", num_experts + num_ranks);
  make(&tables.num_rows, "num_rows", 2);
  make(&tables.num_tokens_per_expert, "num_tokens_per_expert", num_experts);
  make(&tables.expert_offsets, "expert_offsets", num_experts + 1);
  make(&tables.status, "status", 2);
  const int64_t most_chunks = num_chunks(shape_.num_max_tokens);
  make(&own.chunk_counts, "chunk_counts", most_chunks * (num_experts + num_ranks));
  make(&own.place_in_chunk, "place_in_chunk", shape_.num_max_tokens * shape_.num_topk);
  make(&own.bad_choice, "bad_choice", most_chunks);
  if (shape_.has_replicas())
    make_replicas(rank_idx);
}

void KernelWorld::make_replicas(int rank_idx) {
  const layout::Replicas replicas = shape_.replicas(placement_);
  const layout::ReplicaTable from = replicas.slots.table();
  const auto put_array = [&](const char* name, const int32_t* values, int64_t count) {
    return put(rank_idx, Ownership::kDevice, name, std::vector<int32_t>(values, values + count));
  };
  kernels::Replicas& to = rank(rank_idx).replicas;
  to.num_experts = shape_.num_logical_experts;
  to.num_local_ranks = replicas.num_local_ranks;
  to.table.num_ranks = from.num_ranks;
  to.table.slot_rank = put_array("slot_rank", from.slot_rank, shape_.num_experts);
  to.table.slot_expert = put_array("slot_expert", from.slot_expert, shape_.num_experts);
  to.table.expert_begin = put_array("expert_begin", from.expert_begin, to.num_experts + 1);
  to.table.expert_slots =
      put_array("expert_slots", from.expert_slots, from.expert_begin[to.num_experts]);
  to.table.rank_begin = put_array("rank_begin", from.rank_begin, from.num_ranks + 1);
  to.table.shared_slots =
      put_array("shared_slots", from.shared_slots, from.rank_begin[from.num_ranks]);
  to.logical = unwritten<int32_t>(
      rank_idx, Ownership::kDevice, "logical counts", int64_t{from.num_ranks} * to.num_experts);
  to.run_begins =
      unwritten<int32_t>(rank_idx, Ownership::kDevice, "run_begins", shape_.num_experts);
  if (!shape_.is_by_rank())
    return;
  to.set_of_expert = put(rank_idx, Ownership::kDevice, "set_of_expert", replicas.set_of_expert);
  to.shared_experts = put(rank_idx, Ownership::kDevice, "shared_experts", replicas.shared_experts);
  to.num_shared = static_cast<int32_t>(replicas.shared_experts.size());
  to.run_tokens = unwritten<int32_t>(
      rank_idx, Ownership::kDevice, "run_tokens", int64_t{2} * from.num_ranks * shape_.num_experts);
  to.set_places = unwritten<uint64_t>(rank_idx, Ownership::kDevice, "set_places", from.num_ranks);
  to.set_words = unwritten<int32_t>(rank_idx, Ownership::kDevice, "set_words", from.num_ranks);
  kernels::TokenSets& sets = rank(rank_idx).sets;
  sets.stride = set_bytes();
  sets.num_nodes = has_nodes() ? shape_.num_ranks / shape_.num_local_ranks : 1;
  const int64_t bytes = sets.stride * kernels::TokenSets::num_places(shape_.depth, sets.num_nodes);
  sets.base = unwritten<std::byte>(rank_idx, Ownership::kHeap, "sets of tokens", bytes);
  // An offer of one rank names another place on the next.
  if (rank_idx % 2 != 0)
    add_segment(rank_idx, unwritten<std::byte>(rank_idx, Ownership::kHeap, "nothing", 64), 64);
  sets.offer = offer_of(rank_idx, add_segment(rank_idx, sets.base, bytes));
  const int64_t num_words =
      2 * layout::TokenSetMap::words_of(shape_.num_max_tokens) * shape_.num_ranks;
  sets.bound_tokens = unwritten<uint32_t>(rank_idx, Ownership::kDevice, "bound_tokens", num_words);
  sets.bound_before = unwritten<int32_t>(rank_idx, Ownership::kDevice, "bound_before", num_words);
}

int64_t KernelWorld::set_bytes() const {
  return shape_.has_replicas() && shape_.is_by_rank()
             ? layout::most_set_bytes(shape_.num_ranks,
                                      std::max(layout::most_shared_experts(shape_.num_experts), 1),
                                      shape_.num_max_tokens,
                                      shape_.num_topk)
             : 0;
}

device::Launch KernelWorld::shape_of(int rank_idx, int num_blocks) {
  device::Launch launch;
  launch.num_blocks = num_blocks;
  launch.num_threads = shape_.num_threads;
  launch.stream = static_cast<simt::Stream*>(rank(rank_idx).stream.get());
  return launch;
}

device::Launch KernelWorld::shape_behind(int rank_idx) {
  device::Launch launch = shape_of(rank_idx, shape_.num_blocks);
  launch.is_dependent = true;
  return launch;
}

// --- Dispatch ----------------------------------------------------------------------------------

KernelWorld::Inputs KernelWorld::put_inputs(int rank_idx, const RankInputs& inputs) {
  Inputs place;
  place.topk_idx = put(rank_idx, Ownership::kDevice, "topk_idx", inputs.passed_idx);
  place.x = put(rank_idx, Ownership::kDevice, "x", inputs.x);
  if (shape_.with_weights)
    place.weights = reinterpret_cast<const std::byte*>(
        put(rank_idx, Ownership::kDevice, "weights", inputs.weights));
  if (shape_.with_masks)
    place.is_masked = put(rank_idx, Ownership::kDevice, "is_masked", inputs.is_masked);
  return place;
}

layout::OperationArguments KernelWorld::arguments(layout::Operation operation,
                                                  bool with_weights) const {
  const bool is_combine = operation == layout::Operation::kCombine;
  layout::OperationArguments arguments;
  arguments.operation = static_cast<int32_t>(operation);
  arguments.layout = static_cast<int32_t>(shape_.layout);
  arguments.expert_alignment = static_cast<int32_t>(shape_.expert_alignment);
  arguments.dtype = dlpack_type(shape_.dtype);
  arguments.row_bytes = is_combine ? shape_.source_row_bytes() : shape_.row_bytes();
  arguments.weight_bytes = with_weights ? 4 : 0;
  if (!is_combine) {
    arguments.num_scales = static_cast<int32_t>(shape_.num_scales());
    arguments.scale_bytes = static_cast<int32_t>(shape_.scale_bytes());
    arguments.on_overflow = static_cast<int32_t>(shape_.rule.on_overflow);
    arguments.expert_capacity = shape_.rule.expert_capacity;
  }
  return arguments;
}

int64_t* KernelWorld::unwritten_choices(int rank_idx, const RankInputs& inputs) {
  return unwritten<int64_t>(rank_idx,
                            Ownership::kDevice,
                            "kept choices",
                            std::max<int64_t>(1, inputs.num_tokens() * shape_.num_topk));
}

kernels::Choices KernelWorld::choices_of(int rank_idx,
                                         const RankInputs& inputs,
                                         const int64_t* asked_idx,
                                         int64_t* topk_idx) {
  const Rank& own = rank(rank_idx);
  kernels::Choices choices;
  choices.asked_idx = asked_idx;
  choices.topk_idx = topk_idx;
  choices.num_tokens = inputs.num_tokens();
  choices.num_topk = shape_.num_topk;
  choices.num_slots = static_cast<int32_t>(
      layout::num_slots_per_token(shape_.layout, shape_.num_topk, shape_.num_ranks));
  choices.is_by_rank = shape_.is_by_rank();
  choices.tokens_per_chunk = kTokensPerChunk;
  choices.num_chunks = static_cast<int32_t>(num_chunks(inputs.num_tokens()));
  choices.chunk_counts = own.chunk_counts;
  choices.place_in_chunk = own.place_in_chunk;
  choices.bad_choice = own.bad_choice;
  return choices;
}

kernels::ExchangeParams KernelWorld::dispatch_exchange(int rank_idx,
                                                       const RankInputs& inputs,
                                                       const kernels::Choices& choices,
                                                       const Inputs& place,
                                                       const Offer& offer) {
  kernels::ExchangeParams params;
  params.buffer = rank(rank_idx).buffer;
  params.tables = rank(rank_idx).tables;
  params.arguments = arguments(layout::Operation::kDispatch, shape_.with_weights);
  params.offer = offer;
  params.num_tokens = static_cast<int32_t>(inputs.num_tokens());
  params.num_topk = shape_.num_topk;
  params.fixed_rows = static_cast<int32_t>(inputs.fixed_rows);
  params.is_dispatch = 1;
  params.with_counts = 1;
  params.choices = choices;
  params.replicas = rank(rank_idx).replicas;
  params.sets = rank(rank_idx).sets;
  if (params.sets.base != nullptr) {
    params.choices.is_by_rank = 0;
    params.choices.num_slots = choices.num_topk;
  }
  params.is_masked = place.is_masked;
  params.rule = shape_.rule;
  params.arrangement = shape_.arrangement();
  params.is_column_major = shape_.is_column_major;
  params.with_topk_idx = shape_.is_by_rank();
  return params;
}

kernels::DispatchParams KernelWorld::dispatch_rows(int rank_idx,
                                                   const kernels::Choices& choices,
                                                   const Inputs& place,
                                                   int64_t* slots) {
  kernels::DispatchParams params;
  params.buffer = rank(rank_idx).buffer;
  params.tables = rank(rank_idx).tables;
  params.choices = choices;
  params.replicas = rank(rank_idx).replicas;
  params.sets = rank(rank_idx).sets;
  params.x = place.x;
  params.source_row_bytes = shape_.source_row_bytes();
  params.row_bytes = shape_.row_bytes();
  params.weights = place.weights;
  params.weight_bytes = shape_.with_weights ? 4 : 0;
  params.slots = slots;
  const cpu::RowQuantization& how = shape_.quantization;
  params.quantize = {
      shape_.is_quantized, shape_.dtype, how.block, how.least_amax, how.scale_format};
  params.num_scales = static_cast<int32_t>(shape_.num_scales());
  params.scale_bytes = static_cast<int32_t>(shape_.scale_bytes());
  params.arrangement = shape_.arrangement();
  params.with_topk_idx = shape_.is_by_rank();
  params.is_plain = shape_.is_plain;
  params.num_parts = shape_.num_parts;
  return params;
}

void KernelWorld::launch_rows(int rank_idx, const kernels::DispatchParams& params) {
  device::Launch launch = shape_of(rank_idx, shape_.num_blocks);
  if (has_nodes()) {
    const kernels::Rails& rails = rank(rank_idx).rails;
    launch.shared_bytes =
        kernels::internode_dispatch_shared_bytes(params, rails, launch.num_threads);
    kernels::launch_internode_dispatch(launch, params, rails);
    return;
  }
  launch.is_dependent = true;
  launch.shared_bytes = kernels::dispatch_shared_bytes(params, launch.num_threads);
  kernels::launch_dispatch(launch, params);
}

void KernelWorld::receive(int rank_idx, layout::Operation operation) {
  const Rank& own = rank(rank_idx);
  kernels::ReceiveParams params;
  params.buffer = own.buffer;
  params.tables = own.tables;
  params.operation = operation;
  params.arrangement = shape_.arrangement();
  params.row_bytes = shape_.row_bytes();
  params.is_plain = shape_.is_plain;
  kernels::launch_receive(shape_behind(rank_idx), params);
}

KernelWorld::Handle KernelWorld::dispatch(int rank_idx, const Step& step) {
  const Sent sent = send(rank_idx, step);
  receive(rank_idx);
  check(rank_idx, step, sent);
  return sent.handle;
}

KernelWorld::Handle KernelWorld::dispatch_unchecked(int rank_idx, const Step& step) {
  const Handle handle = send(rank_idx, step).handle;
  receive(rank_idx);
  return handle;
}

KernelWorld::Sent KernelWorld::send(int rank_idx, const Step& step) {
  Rank& own = rank(rank_idx);
  const RankInputs& inputs = step.inputs[static_cast<size_t>(rank_idx)];
  const Inputs place = put_inputs(rank_idx, inputs);
  Sent sent;
  sent.segment_idx = own.num_dispatched++ % kNumWindows;
  Handle& handle = sent.handle;
  handle.topk_idx = unwritten_choices(rank_idx, inputs);
  const kernels::Choices choices = choices_of(rank_idx, inputs, place.topk_idx, handle.topk_idx);
  handle.slots = unwritten<int64_t>(rank_idx,
                                    Ownership::kDevice,
                                    "slots",
                                    std::max<int64_t>(1, inputs.num_tokens() * choices.num_slots));
  handle.kept = put(rank_idx, Ownership::kDevice, "kept counts", step.kept.counts);
  const auto params =
      dispatch_exchange(rank_idx, inputs, choices, place, offer_of(rank_idx, sent.segment_idx));
  launch_exchange(rank_idx, params);
  launch_rows(rank_idx, dispatch_rows(rank_idx, choices, place, handle.slots));
  sent.epoch = ++own.epoch;
  return sent;
}

void KernelWorld::dispatch_cached(int rank_idx, const Step& cached, const Handle& handle) {
  Rank& own = rank(rank_idx);
  const RankInputs& inputs = cached.inputs[static_cast<size_t>(rank_idx)];
  const Inputs place = put_inputs(rank_idx, inputs);
  kernels::Choices choices = choices_of(rank_idx, inputs, nullptr, handle.topk_idx);
  choices.chunk_counts = nullptr;
  choices.place_in_chunk = nullptr;
  choices.bad_choice = nullptr;
  const int segment_idx = own.num_dispatched++ % kNumWindows;
  auto exchange =
      dispatch_exchange(rank_idx, inputs, choices, place, offer_of(rank_idx, segment_idx));
  exchange.arguments = arguments(layout::Operation::kCachedDispatch, shape_.with_weights);
  exchange.with_counts = 0;
  exchange.with_topk_idx = 0;
  exchange.kept_counts = handle.kept;
  launch_exchange(rank_idx, exchange);
  auto rows = dispatch_rows(rank_idx, choices, place, handle.slots);
  rows.is_cached = 1;
  rows.with_topk_idx = 0;
  launch_rows(rank_idx, rows);
  receive(rank_idx, layout::Operation::kCachedDispatch);
  const uint64_t epoch = ++own.epoch;
  ++num_checks_due_;
  own.stream->call("check of a cached dispatch",
                   [this, rank_idx, &cached, segment_idx, handle, epoch] {
                     check_tables(rank_idx, cached, epoch, true);
                     check_dispatch(rank_idx, cached, segment_idx, handle.slots);
                   });
  count_traffic(rank_idx, cached, false, true);
  count_puts(rank_idx, cached, layout::Operation::kCachedDispatch, false);
}

// --- Combine -----------------------------------------------------------------------------------

namespace {

layout::RankSumsMap rank_sums_map(const kernels::CombineParams& combine) {
  return layout::RankSumsMap::make(combine.num_tokens, combine.num_slots, sizeof(float));
}

}  // namespace

KernelWorld::Outputs KernelWorld::draw_outputs(const Step& step) {
  Outputs outputs;
  for (int rank_idx = 0; rank_idx < shape_.num_ranks; ++rank_idx) {
    const ExpectedDispatch& expected = step.dispatched[static_cast<size_t>(rank_idx)];
    const int64_t num_rows = expected.received.num_rows;
    outputs.rows.push_back(draw_rows(shape_.dtype, num_rows * shape_.hidden, &run_.random()));
    const int64_t per_row = shape_.is_by_rank() ? step.num_recv_topk : 1;
    std::vector<float> weights;
    for (int64_t i = 0; i < num_rows * per_row; ++i)
      weights.push_back(static_cast<float>(run_.random().below(1000)) + 0.5f);
    outputs.row_weights.push_back(std::move(weights));
    const auto& rows = outputs.rows.back();
    const auto& row_weights = outputs.row_weights.back();
    outputs.rows_segment.push_back(
        add_segment(rank_idx,
                    put(rank_idx, Ownership::kHeap, "expert output", rows),
                    static_cast<int64_t>(rows.size())));
    outputs.weights_segment.push_back(add_segment(
        rank_idx,
        reinterpret_cast<std::byte*>(put(rank_idx, Ownership::kHeap, "row weights", row_weights)),
        static_cast<int64_t>(row_weights.size() * 4)));
  }
  return outputs;
}

KernelWorld::Combined KernelWorld::launch_combine(int rank_idx,
                                                  const Step& step,
                                                  const Handle& handle,
                                                  const Outputs& outputs,
                                                  bool is_weighted,
                                                  bool pulls_weights,
                                                  bool ends_behind_exchange) {
  Rank& own = rank(rank_idx);
  const RankInputs& inputs = step.inputs[static_cast<size_t>(rank_idx)];
  const int rows_segment = outputs.rows_segment[static_cast<size_t>(rank_idx)];
  const int weights_segment = outputs.weights_segment[static_cast<size_t>(rank_idx)];
  // Experts write what is pulled, so that peers' bulk copies meet ordinary stores.
  own.stream->call("experts", [this, rank_idx, rows_segment] {
    const Segment output = rank(rank_idx).segments[static_cast<size_t>(rows_segment)];
    for (int64_t offset = 0; offset + 16 <= output.bytes; offset += 16)
      memory::store(output.base + offset, run_.guest().real(output.base + offset), 16);
  });
  kernels::ExchangeParams exchange;
  exchange.buffer = own.buffer;
  exchange.tables = own.tables;
  exchange.arguments = arguments(layout::Operation::kCombine, pulls_weights);
  exchange.offer = offer_of(rank_idx, rows_segment);
  exchange.weights_offer = offer_of(rank_idx, weights_segment);
  exchange.num_tokens = static_cast<int32_t>(inputs.num_tokens());
  exchange.num_topk = shape_.num_topk;
  exchange.arrangement = shape_.arrangement();
  exchange.kept_counts = handle.kept;
  Combined combined;
  kernels::CombineParams& params = combined.params;
  params = combine_rows(rank_idx, step, handle, is_weighted, pulls_weights);
  if (shape_.adds_by_rank()) {
    combined.requests_segment = launch_rank_requests(rank_idx, step, outputs, params);
    exchange.adds_for_peers = 1;
    exchange.offer = offer_of(rank_idx, combined.requests_segment);
    const int64_t sums_offset = rank_sums_map(params).sums_offset;
    exchange.offer.offset += static_cast<uint64_t>(sums_offset);
    exchange.offer.bytes -= static_cast<uint64_t>(sums_offset);
  }
  launch_exchange(rank_idx, exchange);
  if (ends_behind_exchange)
    return combined;
  if (shape_.adds_by_rank())
    launch_rank_sums(rank_idx, outputs, combined.requests_segment, &params);
  launch_sums(rank_idx, params);
  return combined;
}

void KernelWorld::combine(int rank_idx,
                          const Step& step,
                          const Handle& handle,
                          const Outputs& outputs,
                          bool is_weighted,
                          bool pulls_weights) {
  const auto [params, requests_segment] =
      launch_combine(rank_idx, step, handle, outputs, is_weighted, pulls_weights, false);
  Rank& own = rank(rank_idx);
  const auto sums = std::make_shared<ExpectedBytes>(
      expected_sums(shape_, step, outputs.rows, rank_idx, is_weighted));
  const auto pulled = std::make_shared<ExpectedBytes>(
      pulls_weights ? expected_pulled(shape_, placement_, step, outputs.row_weights, rank_idx)
                    : ExpectedBytes());
  const auto segment = [&](const std::vector<int>& segments) {
    return own.segments[static_cast<size_t>(segments[static_cast<size_t>(rank_idx)])];
  };
  const Segment output = segment(outputs.rows_segment);
  const Segment row_weights = segment(outputs.weights_segment);
  const Segment requests =
      requests_segment < 0 ? Segment{} : own.segments[static_cast<size_t>(requests_segment)];
  const uint64_t epoch = ++own.epoch;
  ++num_checks_due_;
  own.stream->call(
      "check of a combine",
      [this, rank_idx, epoch, params = params, sums, pulled, output, row_weights, requests] {
        const kernels::Tables& tables = rank(rank_idx).tables;
        expect_equal(read(tables.status), int32_t{0}, "status of a combine");
        expect_equal(read(tables.epoch), epoch, "epoch of a combine");
        compare(params.sums, *sums, "sums");
        if (params.pulled != nullptr)
          compare(params.pulled, *pulled, "pulled weights");
        // Rows are their owner's again.
        overwrite(output.base, output.bytes);
        overwrite(row_weights.base, row_weights.bytes / 16 * 16);
        overwrite(requests.base, requests.bytes / 16 * 16);
        ++num_checks_made_;
      });
  count_traffic(rank_idx, step, true, false);
  count_pulled_across(rank_idx, step.dispatched[static_cast<size_t>(rank_idx)], is_weighted);
  count_puts(rank_idx, step, layout::Operation::kCombine, pulls_weights, is_weighted);
}

kernels::CombineParams KernelWorld::combine_rows(
    int rank_idx, const Step& step, const Handle& handle, bool is_weighted, bool pulls_weights) {
  const Rank& own = rank(rank_idx);
  const RankInputs& inputs = step.inputs[static_cast<size_t>(rank_idx)];
  kernels::CombineParams params;
  params.buffer = own.buffer;
  params.tables = own.tables;
  params.dtype = shape_.dtype;
  params.hidden = shape_.hidden;
  params.num_tokens = inputs.num_tokens();
  params.num_topk = shape_.num_topk;
  params.num_slots = static_cast<int32_t>(
      layout::num_slots_per_token(shape_.layout, shape_.num_topk, shape_.num_ranks));
  params.num_recv_topk = static_cast<int32_t>(step.num_recv_topk);
  params.arrangement = shape_.arrangement();
  params.slots = handle.slots;
  params.topk_idx = handle.topk_idx;
  if (is_weighted) {
    params.weights = reinterpret_cast<const std::byte*>(
        put(rank_idx, Ownership::kDevice, "combine weights", inputs.weights));
    params.weight_bytes = 4;
  }
  const int64_t sums_bytes = inputs.num_tokens() * shape_.source_row_bytes();
  const int64_t num_choices = inputs.num_tokens() * shape_.num_topk;
  params.sums =
      unwritten<std::byte>(rank_idx, Ownership::kDevice, "sums", std::max<int64_t>(sums_bytes, 16));
  if (pulls_weights) {
    params.pulled = unwritten<std::byte>(
        rank_idx, Ownership::kDevice, "pulled weights", std::max<int64_t>(4 * num_choices, 4));
    params.pulled_bytes = 4;
  }
  params.is_plain = shape_.is_plain;
  params.node_reduction = shape_.node_reduction ? 1 : 0;
  return params;
}

int KernelWorld::launch_rank_requests(int rank_idx,
                                      const Step& step,
                                      const Outputs& outputs,
                                      const kernels::CombineParams& combine) {
  const ExpectedDispatch& expected = step.dispatched[static_cast<size_t>(rank_idx)];
  const int64_t bytes =
      rank_sums_map(combine).bytes(expected.received.num_rows, shape_.source_row_bytes());
  auto* const window = unwritten<std::byte>(rank_idx, Ownership::kHeap, "rank sums", bytes);
  kernels::RankRequestsParams params;
  params.num_ranks = shape_.num_ranks;
  params.num_tokens = combine.num_tokens;
  params.num_slots = combine.num_slots;
  params.slots = combine.slots;
  params.weights = combine.weights;
  params.weight_bytes = combine.weight_bytes;
  params.window = window;
  if (shape_.offers_rows)
    params.rows = offer_of(rank_idx, outputs.rows_segment[static_cast<size_t>(rank_idx)]);
  kernels::launch_rank_requests(shape_of(rank_idx, shape_.num_blocks), params);
  return add_segment(rank_idx, window, bytes);
}

void KernelWorld::launch_rank_sums(int rank_idx,
                                   const Outputs& outputs,
                                   int requests_segment,
                                   kernels::CombineParams* combine) {
  const Rank& own = rank(rank_idx);
  const auto segment = [&](int segment_idx) {
    return own.segments[static_cast<size_t>(segment_idx)].base;
  };
  std::byte* const requests = segment(requests_segment);
  kernels::RankSumsParams params;
  params.buffer = own.buffer;
  params.tables = own.tables;
  params.dtype = shape_.dtype;
  params.hidden = shape_.hidden;
  params.rows = segment(outputs.rows_segment[static_cast<size_t>(rank_idx)]);
  params.sums = requests + rank_sums_map(*combine).sums_offset;
  kernels::launch_rank_sums(shape_behind(rank_idx), params);
  combine->row_slots = reinterpret_cast<const int64_t*>(requests);
  combine->weights = nullptr;
  combine->weight_bytes = 0;
}

void KernelWorld::launch_sums(int rank_idx, const kernels::CombineParams& params) {
  device::Launch launch = shape_of(rank_idx, shape_.num_blocks);
  if (has_nodes()) {
    launch.shared_bytes =
        kernels::internode_combine_shared_bytes(params, rank(rank_idx).rails, launch.num_threads);
    kernels::launch_internode_combine(launch, params, rank(rank_idx).rails);
  } else {
    launch.is_dependent = true;
    launch.shared_bytes = kernels::combine_shared_bytes(params, launch.num_threads);
    kernels::launch_combine(launch, params);
  }
}

// --- A host that waits for sizes ---------------------------------------------------------------

/// Does what a host does that reads of ranks that are short. @return where rows of this rank come
/// then.
int KernelWorld::offer_again(int rank_idx,
                             const Step& step,
                             const std::vector<uint8_t>& short_ranks,
                             bool has_memory,
                             int segment_idx) {
  Rank& own = rank(rank_idx);
  kernels::OffersParams offers;
  offers.buffer = own.buffer;
  offers.tables = own.tables;
  offers.is_short = short_ranks[static_cast<size_t>(rank_idx)];
  offers.short_ranks = put(rank_idx, Ownership::kDevice, "short_ranks", short_ranks);
  offers.host_read = reinterpret_cast<kernels::HostRead*>(own.host_read);
  offers.ticket = ++own.ticket;
  if (offers.is_short != 0) {
    const ExpectedDispatch& expected = step.dispatched[static_cast<size_t>(rank_idx)];
    offers.own.needed_bytes = static_cast<uint64_t>(expected.window.bytes);
    if (has_memory) {
      const int64_t bytes = expected.window.bytes;
      segment_idx =
          add_segment(rank_idx,
                      unwritten<std::byte>(rank_idx, Ownership::kHeap, "second window", bytes),
                      bytes);
      offers.own.offer = offer_of(rank_idx, segment_idx);
    }
  }
  if (has_nodes())
    kernels::launch_internode_offers(shape_of(rank_idx, 1), offers, own.rails);
  else
    kernels::launch_offers(shape_of(rank_idx, 1), offers);
  return segment_idx;
}

void KernelWorld::dispatch_by_host(
    int rank_idx, const Step& step, int64_t first_rows, bool has_memory, bool sends_ahead) {
  Rank& own = rank(rank_idx);
  const RankInputs& inputs = step.inputs[static_cast<size_t>(rank_idx)];
  const Inputs place = put_inputs(rank_idx, inputs);
  const kernels::Choices choices =
      choices_of(rank_idx, inputs, place.topk_idx, unwritten_choices(rank_idx, inputs));
  const int64_t stride = layout::Row::stride(shape_.num_ranks, shape_.num_experts);
  if (own.host_read == nullptr)
    own.host_read = zeros<std::byte>(rank_idx,
                                     Ownership::kHost,
                                     "host read",
                                     64 + std::max<int64_t>(stride, 64) * shape_.num_ranks);
  auto* const host_read = reinterpret_cast<kernels::HostRead*>(own.host_read);
  const auto await_ticket = [&](uint64_t ticket) {
    while (memory::atomic_load(&host_read->ticket, 8, Order::kAcquire, Reach::kSystem) != ticket)
      run_.scheduler().idle(1000);
    return static_cast<kernels::OperationStatus>(read(&host_read->status));
  };
  int segment_idx = own.num_dispatched++ % kNumWindows;
  const int64_t first_bytes = first_rows * shape_.row_bytes();
  int64_t* const slots =
      unwritten<int64_t>(rank_idx,
                         Ownership::kDevice,
                         "slots",
                         std::max<int64_t>(1, inputs.num_tokens() * choices.num_slots));
  auto exchange = dispatch_exchange(
      rank_idx, inputs, choices, place, offer_of(rank_idx, segment_idx, first_bytes));
  exchange.host_read = host_read;
  exchange.ticket = ++own.ticket;
  launch_exchange(rank_idx, exchange);
  const kernels::DispatchParams rows = dispatch_rows(rank_idx, choices, place, slots);
  if (sends_ahead)
    launch_rows(rank_idx, rows);
  kernels::OperationStatus status = await_ticket(own.ticket);
  // Every host sees in the same rows which ranks are short.
  std::vector<uint8_t> short_ranks(static_cast<size_t>(shape_.num_ranks));
  bool any_short = false;
  for (int peer_rank = 0; peer_rank < shape_.num_ranks; ++peer_rank) {
    const auto* const row = reinterpret_cast<const layout::Row*>(
        own.host_read + sizeof(kernels::HostRead) + peer_rank * stride);
    const auto needed =
        static_cast<uint64_t>(step.dispatched[static_cast<size_t>(peer_rank)].window.bytes);
    short_ranks[static_cast<size_t>(peer_rank)] = read(&row->offer.bytes) < needed;
    any_short = any_short || short_ranks[static_cast<size_t>(peer_rank)] != 0;
  }
  expect_equal(static_cast<int>(status),
               static_cast<int>(any_short ? kernels::OperationStatus::kShort
                                          : kernels::OperationStatus::kOk),
               "status that the host reads");
  if (any_short) {
    segment_idx = offer_again(rank_idx, step, short_ranks, has_memory, segment_idx);
    status = await_ticket(own.ticket);
  }
  const uint64_t epoch = ++own.epoch;
  if (status != kernels::OperationStatus::kOk) {
    expect_equal(has_memory, false, "a second offer failed although there was memory");
    return;
  }
  if (!sends_ahead || any_short)
    launch_rows(rank_idx, rows);
  receive(rank_idx);
  ++num_checks_due_;
  own.stream->call("check of a dispatch", [this, rank_idx, &step, segment_idx, slots, epoch] {
    check_tables(rank_idx, step, epoch, false);
    check_dispatch(rank_idx, step, segment_idx, slots);
  });
}

}  // namespace moe::simt::checker
