#include "ops/internode_dispatch.h"

#include <algorithm>
#include <cstring>

namespace moe::ops {

using layout::InternodeChunk;
using layout::InternodeCut;
using layout::InternodeHeader;
using layout::InternodeRow;
using layout::Slot;

namespace {

// Written to this node between two looks at the rail.
constexpr int64_t kLocalBytesPerStep = int64_t{4} << 20;

SlotTable local_table(const Plan& plan, const std::vector<int64_t>& slots) {
  SlotTable table = SlotTable::of(plan);
  table.slots = slots.data();
  return table;
}

}  // namespace

InternodeDispatch::InternodeDispatch(Endpoint& endpoint,
                                     const DispatchParams& params,
                                     const Plan& plan,
                                     const RowTargets& targets,
                                     Exchange& exchange)
    : endpoint_(endpoint),
      params_(params),
      plan_(plan),
      targets_(targets),
      exchange_(exchange),
      relay_(*exchange.relay()),
      nodes_(endpoint.group().nodes()),
      own_node_(nodes_.node_idx(endpoint.rank_idx())),
      own_row_(row_of(endpoint.rank_idx())),
      rows_per_chunk_(InternodeCut::rows_per_chunk(own_row_.bytes(), nodes_.num_nodes())),
      num_window_rows_(
          layout::num_window_rows(plan.counts, endpoint.placement(), plan.arrangement)),
      local_slots_(plan.slots.size(), Slot::kNone),
      local_writer_(endpoint, params, local_table(plan, local_slots_), targets, exchange) {}

InternodeRow InternodeDispatch::row_of(int src_rank) const {
  const auto& arrangement = plan_.arrangement;
  const bool with_ids = arrangement.is_by_rank()
                            ? targets_.with_topk_idx || params_.weight_bytes > 0
                            : params_.num_scales > 0 && params_.is_column_major();
  return InternodeRow::make(arrangement.layout,
                            params_.row_bytes,
                            params_.num_scales * params_.scale_bytes,
                            params_.weight_bytes,
                            plan_.counts.num_topk(src_rank),
                            nodes_.num_local_ranks,
                            with_ids);
}

bool InternodeDispatch::sends_to_node(int src_rank, int node_idx) const {
  for (int i = 0; i < nodes_.num_local_ranks; ++i)
    if (layout::sends_rows(plan_.counts, src_rank, nodes_.rank_of(node_idx, i)))
      return true;
  return false;
}

void InternodeDispatch::run(cpu::StoreMode mode, const std::function<void()>& on_written) {
  split_slots();
  start();
  while (true) {
    bool has_moved = false;
    for (auto& departure : departures_)
      has_moved |= step_departure(departure);
    for (auto& arrival : arrivals_)
      has_moved |= step_arrival(arrival, mode);
    std::erase_if(arrivals_, [this](const Arrival& arrival) { return has_ended(arrival); });
    has_moved |= step_local(mode, on_written);
    std::erase_if(departures_, [](const Departure& departure) {
      return departure.next == departure.tokens.size();
    });
    if (is_written_ && departures_.empty() && arrivals_.empty())
      return;
    if (!has_moved)
      wait();
  }
}

/// Lists the tokens for every other node, and the slots on this one.
void InternodeDispatch::split_slots() {
  const int num_nodes = nodes_.num_nodes();
  const int64_t num_slots = plan_.num_slots;
  std::vector<std::vector<int64_t>> tokens(static_cast<size_t>(num_nodes));
  for (int64_t token_idx = 0; token_idx < params_.num_tokens; ++token_idx) {
    const int64_t* const slots = plan_.slots.data() + token_idx * num_slots;
    int64_t* const local = local_slots_.data() + token_idx * num_slots;
    int64_t num_local = 0;
    for (int64_t i = 0; i < num_slots; ++i) {
      if (slots[i] == Slot::kNone)
        continue;
      const int node_idx = nodes_.node_idx(Slot::rank_idx(slots[i]));
      auto& of_node = tokens[static_cast<size_t>(node_idx)];
      if (node_idx == own_node_)
        local[plan_.arrangement.is_by_rank() ? num_local++ : i] = slots[i];
      else if (of_node.empty() || of_node.back() != token_idx)
        of_node.push_back(token_idx);
    }
  }
  for (const int node_idx : relay_.nodes()) {
    if (!sends_to_node(endpoint_.rank_idx(), node_idx))
      continue;
    Departure departure;
    departure.node_idx = node_idx;
    departure.tokens = std::move(tokens[static_cast<size_t>(node_idx)]);
    departures_.push_back(std::move(departure));
  }
}

void InternodeDispatch::start() {
  for (const auto& departure : departures_) {
    const Rail::Buffer buffer = relay_.buffer(sizeof(InternodeHeader));
    const InternodeHeader header{static_cast<int64_t>(departure.tokens.size())};
    std::memcpy(buffer.get(), &header, sizeof(header));
    relay_.send(departure.node_idx, buffer, sizeof(header));
  }
  for (const int node_idx : relay_.nodes()) {
    const int src_rank = relay_.rail_rank(node_idx);
    const bool has_rows = sends_to_node(src_rank, own_node_);
    if (!has_rows) {
      relay_.release_done(src_rank);
      continue;
    }
    Arrival arrival;
    arrival.node_idx = node_idx;
    arrival.src_rank = src_rank;
    arrival.num_topk = plan_.counts.num_topk(src_rank);
    arrival.row = row_of(src_rank);
    arrival.header_buffer = relay_.buffer(sizeof(InternodeHeader));
    arrival.header = relay_.receive(node_idx, arrival.header_buffer, sizeof(InternodeHeader));
    arrivals_.push_back(std::move(arrival));
  }
}

bool InternodeDispatch::step_departure(Departure& departure) {
  auto& in_flight = departure.in_flight;
  while (!in_flight.empty() && relay_.has_moved(in_flight.front(), departure.node_idx))
    in_flight.pop_front();
  const auto num_left = static_cast<int64_t>(departure.tokens.size() - departure.next);
  if (num_left == 0 || static_cast<int64_t>(in_flight.size()) >= InternodeCut::kChunksInFlight)
    return false;
  const auto chunk = InternodeChunk::make(own_row_, std::min(num_left, rows_per_chunk_));
  const Rail::Buffer buffer = relay_.buffer(static_cast<uint64_t>(chunk.bytes));
  pack(departure, chunk, buffer.get());
  in_flight.push_back(relay_.send(departure.node_idx, buffer, static_cast<uint64_t>(chunk.bytes)));
  departure.next += static_cast<size_t>(chunk.num_rows);
  exchange_.progress();
  return true;
}

void InternodeDispatch::pack(const Departure& departure,
                             const InternodeChunk& chunk,
                             std::byte* message) const {
  const int64_t* const tokens = departure.tokens.data() + departure.next;
  // Places that no row fills travel as well.
  const auto clear = [&](int64_t end, int64_t next) {
    std::memset(message + end, 0, static_cast<size_t>(next - end));
  };
  clear(chunk.num_rows * own_row_.row_bytes, chunk.scales_at);
  clear(chunk.scales_at + chunk.num_rows * own_row_.scale_bytes, chunk.slots_at);
  clear(chunk.slots_at + chunk.num_rows * own_row_.num_slots * 8, chunk.weights_at);
  clear(chunk.weights_at + chunk.num_rows * own_row_.weight_bytes, chunk.ids_at);
  clear(chunk.ids_at + chunk.num_rows * own_row_.num_ids * 4, chunk.bytes);
  endpoint_.for_tokens(
      chunk.num_rows, chunk.num_rows * own_row_.row_bytes, [&](int64_t begin, int64_t end) {
        const cpu::FloatingPointScope scope;
        for (int64_t row_idx = begin; row_idx < end; ++row_idx) {
          local_writer_.write_to_message(
              tokens[row_idx],
              message + row_idx * own_row_.row_bytes,
              message + chunk.scales_at + row_idx * own_row_.scale_bytes);
          pack_choices(tokens[row_idx], row_idx, departure.node_idx, chunk, message);
        }
      });
}

void InternodeDispatch::pack_choices(int64_t token_idx,
                                     int64_t row_idx,
                                     int node_idx,
                                     const InternodeChunk& chunk,
                                     std::byte* message) const {
  const int64_t* const slots = plan_.slots.data() + token_idx * plan_.num_slots;
  auto* const packed =
      reinterpret_cast<int64_t*>(message + chunk.slots_at) + row_idx * own_row_.num_slots;
  std::fill_n(packed, own_row_.num_slots, Slot::kNone);
  int64_t num_packed = 0;
  for (int64_t i = 0; i < plan_.num_slots; ++i)
    if (slots[i] != Slot::kNone && nodes_.node_idx(Slot::rank_idx(slots[i])) == node_idx)
      packed[plan_.arrangement.is_by_rank() ? num_packed++ : i] = slots[i];
  if (own_row_.weight_bytes > 0)
    std::memcpy(message + chunk.weights_at + row_idx * own_row_.weight_bytes,
                params_.weights + token_idx * own_row_.weight_bytes,
                static_cast<size_t>(own_row_.weight_bytes));
  auto* const ids = reinterpret_cast<int32_t*>(message + chunk.ids_at) + row_idx * own_row_.num_ids;
  for (int64_t k = 0; k < own_row_.num_ids; ++k)
    ids[k] =
        static_cast<int32_t>(plan_.topk_idx[static_cast<size_t>(token_idx * plan_.num_topk + k)]);
}

bool InternodeDispatch::step_arrival(Arrival& arrival, cpu::StoreMode mode) {
  if (arrival.header != nullptr) {
    if (!relay_.has_moved(arrival.header, arrival.node_idx))
      return false;
    take_header(arrival);
    return true;
  }
  if (arrival.in_flight.empty() ||
      !relay_.has_moved(arrival.in_flight.front().transfer, arrival.node_idx))
    return false;
  const Arrival::Chunk chunk = std::move(arrival.in_flight.front());
  arrival.in_flight.pop_front();
  ask_for_chunks(arrival);
  fan_out(arrival, chunk, mode);
  exchange_.progress();
  if (has_ended(arrival))
    relay_.release_done(arrival.src_rank);
  return true;
}

void InternodeDispatch::take_header(Arrival& arrival) {
  InternodeHeader header;
  std::memcpy(&header, arrival.header_buffer.get(), sizeof(header));
  int64_t num_copies = 0;
  for (int i = 0; i < nodes_.num_local_ranks; ++i)
    for (const int32_t expert_idx :
         endpoint_.placement().local_experts[static_cast<size_t>(nodes_.rank_of(own_node_, i))])
      num_copies += plan_.counts.to_expert(arrival.src_rank, expert_idx);
  if (header.num_rows < 1 || header.num_rows > num_copies)
    throw std::runtime_error(concat("rank ",
                                    arrival.src_rank,
                                    " announces ",
                                    header.num_rows,
                                    " rows for node ",
                                    own_node_,
                                    ", which make ",
                                    num_copies,
                                    " copies there"));
  arrival.num_left = header.num_rows;
  arrival.header = nullptr;
  arrival.header_buffer = nullptr;
  ask_for_chunks(arrival);
}

void InternodeDispatch::ask_for_chunks(Arrival& arrival) {
  const int64_t per_chunk = InternodeCut::rows_per_chunk(arrival.row.bytes(), nodes_.num_nodes());
  while (arrival.num_left > 0 &&
         static_cast<int64_t>(arrival.in_flight.size()) < InternodeCut::kChunksInFlight) {
    Arrival::Chunk chunk;
    chunk.layout = InternodeChunk::make(arrival.row, std::min(arrival.num_left, per_chunk));
    const auto bytes = static_cast<uint64_t>(chunk.layout.bytes);
    chunk.buffer = relay_.buffer(bytes);
    chunk.transfer = relay_.receive(arrival.node_idx, chunk.buffer, bytes);
    arrival.num_left -= chunk.layout.num_rows;
    arrival.in_flight.push_back(std::move(chunk));
  }
}

/// Writes the rows of a chunk to their final places: those of a dispatch whose input they are.
void InternodeDispatch::fan_out(const Arrival& arrival,
                                const Arrival::Chunk& chunk,
                                cpu::StoreMode mode) {
  const std::byte* const message = chunk.buffer.get();
  const auto& row = arrival.row;
  const int64_t num_rows = chunk.layout.num_rows;
  DispatchParams params = params_;
  params.x = message;
  params.num_tokens = num_rows;
  params.source_row_bytes = row.row_bytes;
  params.weights = message + chunk.layout.weights_at;
  params.is_quantized_here = false;
  params.scales = message + chunk.layout.scales_at;
  params.scale_row_stride = row.scale_bytes;
  params.scale_step = params_.scale_bytes;
  std::vector<int64_t> ids(static_cast<size_t>(num_rows * row.num_ids));
  const auto* const packed_ids = reinterpret_cast<const int32_t*>(message + chunk.layout.ids_at);
  std::copy_n(packed_ids, ids.size(), ids.begin());
  SlotTable table;
  table.slots = reinterpret_cast<const int64_t*>(message + chunk.layout.slots_at);
  table.topk_idx = row.num_ids > 0 ? ids.data() : nullptr;
  table.num_slots = row.num_slots;
  table.num_topk = arrival.num_topk;
  table.num_recv_topk = plan_.num_recv_topk;
  table.is_by_rank = plan_.arrangement.is_by_rank();
  check_choices(arrival, table, num_rows);
  RowWriter(endpoint_, params, table, targets_, exchange_).write(0, num_rows, mode);
}

/// A message in the wrong place would be written anywhere.
void InternodeDispatch::check_choices(const Arrival& arrival,
                                      const SlotTable& table,
                                      int64_t num_rows) const {
  for (int64_t i = 0; i < num_rows * table.num_slots; ++i) {
    const int64_t slot = table.slots[i];
    if (slot == Slot::kNone)
      continue;
    const int64_t rank_idx = slot >> Slot::kRowBits;
    if (rank_idx < 0 || rank_idx >= nodes_.num_ranks ||
        targets_.bases[static_cast<size_t>(rank_idx)] == nullptr ||
        Slot::row_idx(slot) >= num_window_rows_[static_cast<size_t>(rank_idx)])
      throw std::runtime_error(concat("rank ",
                                      arrival.src_rank,
                                      " sends a row for row ",
                                      Slot::row_idx(slot),
                                      " of rank ",
                                      rank_idx,
                                      ", which node ",
                                      own_node_,
                                      " has no window for"));
  }
  const int num_experts = endpoint_.config().num_experts;
  for (int64_t i = 0; table.topk_idx != nullptr && i < num_rows * table.num_topk; ++i) {
    // By expert, a choice that has a slot is of one.
    const int64_t least = table.is_by_rank || table.slots[i] == Slot::kNone ? -1 : 0;
    if (table.topk_idx[i] < least || table.topk_idx[i] >= num_experts)
      throw std::runtime_error(concat("rank ",
                                      arrival.src_rank,
                                      " sends a row for expert ",
                                      table.topk_idx[i],
                                      ", expected [",
                                      least,
                                      ", ",
                                      num_experts,
                                      ")"));
  }
}

bool InternodeDispatch::step_local(cpu::StoreMode mode, const std::function<void()>& on_written) {
  if (is_written_)
    return false;
  const int64_t bytes_per_token =
      std::max<int64_t>(params_.row_bytes * std::max<int64_t>(plan_.num_slots, 1), 1);
  const int64_t num_tokens = std::max<int64_t>(kLocalBytesPerStep / bytes_per_token, 1);
  const int64_t end = std::min(next_local_ + num_tokens, params_.num_tokens);
  local_writer_.write(next_local_, end, mode);
  next_local_ = end;
  if (next_local_ == params_.num_tokens) {
    is_written_ = true;
    on_written();
  }
  return true;
}

void InternodeDispatch::wait() {
  const auto is_ready = [this] {
    for (const auto& departure : departures_)
      if (relay_.has_moved(departure.in_flight.front(), departure.node_idx))
        return true;
    for (const auto& arrival : arrivals_)
      if (relay_.has_moved(
              arrival.header != nullptr ? arrival.header : arrival.in_flight.front().transfer,
              arrival.node_idx))
        return true;
    return false;
  };
  relay_.wait(arrivals_.empty() ? departures_.front().node_idx : arrivals_.front().node_idx,
              is_ready);
}

}  // namespace moe::ops
