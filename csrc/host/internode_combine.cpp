#include "host/internode_combine.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "core/math.h"

namespace moe::host {

namespace {

using layout::InternodeCut;
using layout::PullChunks;
using layout::PulledRow;
using layout::Slot;

// Rows added at one go, so that other nodes are served meanwhile.
constexpr int64_t kBytesPerStep = int64_t{4} << 20;

PulledRow pulled_by(const Plan& plan, PulledRow pulled, int src_rank) {
  if (plan.arrangement.is_by_rank())
    pulled.num_weights = plan.counts.num_topk(src_rank);
  return pulled;
}

bool has_moved_or_failed(const Relay::Transfer& transfer) {
  return transfer->state() != Rail::State::kMoving;
}

}  // namespace

bool InternodeCombine::is_pulled_here(const Plan& plan, const Group& group, int rank_idx) {
  const NodeLayout& nodes = group.nodes();
  if (!group.is_local(rank_idx))
    return false;
  for (int node_idx = 0; node_idx < nodes.num_nodes(); ++node_idx)
    if (layout::sends_rows(plan.counts, nodes.rail_rank(group.rank_idx(), node_idx), rank_idx))
      return true;
  return false;
}

InternodeCombine::InternodeCombine(Endpoint& endpoint,
                                   const Plan& plan,
                                   Exchange& exchange,
                                   const PulledRow& pulled,
                                   const PullBases& bases)
    : endpoint_(endpoint),
      plan_(plan),
      exchange_(exchange),
      relay_(*exchange.relay()),
      nodes_(endpoint.group().nodes()),
      own_node_(nodes_.node_idx(endpoint.rank_idx())),
      pulled_(pulled_by(plan, pulled, endpoint.rank_idx())),
      bases_(bases),
      wanted_(static_cast<size_t>(nodes_.num_nodes())) {
  for (const int node_idx : relay_.nodes()) {
    wanted_[static_cast<size_t>(node_idx)].chunks =
        chunks_between(pulled_, endpoint.rank_idx(), node_idx);
    Supply supply;
    supply.node_idx = node_idx;
    supply.src_rank = relay_.rail_rank(node_idx);
    supply.pulled = pulled_by(plan, pulled, supply.src_rank);
    supply.chunks = chunks_between(supply.pulled, supply.src_rank, own_node_);
    supplies_.push_back(std::move(supply));
  }
}

PullChunks InternodeCombine::chunks_between(const PulledRow& pulled,
                                            int src_rank,
                                            int node_idx) const {
  const int64_t num_rows = layout::num_rows_on_node(
      plan_.counts, endpoint_.placement(), plan_.arrangement, nodes_, src_rank, node_idx);
  return PullChunks::make(
      pulled, pulled.bytes() > 0 ? num_rows : 0, plan_.num_recv_topk, nodes_.num_nodes());
}

void InternodeCombine::run(const std::function<void(int64_t, int64_t)>& add_tokens) {
  ask();
  while (!is_finished()) {
    bool is_moving = take_chunks();
    // Others first: what they wait for has further to go.
    for (auto& supply : supplies_)
      is_moving |= serve(&supply);
    const int64_t ready_end = find_ready_end();
    if (ready_end > num_passed_tokens_) {
      add_tokens(num_passed_tokens_, ready_end);
      num_passed_tokens_ = ready_end;
      drop_passed_chunks();
      is_moving = true;
    }
    if (!is_moving) {
      wait();
      continue;
    }
    exchange_.progress();
    endpoint_.group().check_abort();
  }
}

void InternodeCombine::ask() {
  const std::vector<Rail::Buffer> slots = list_slots();
  for (auto& supply : supplies_) {
    const auto& own = wanted_[static_cast<size_t>(supply.node_idx)];
    if (own.chunks.num_rows > 0)
      relay_.send(supply.node_idx,
                  slots[static_cast<size_t>(supply.node_idx)],
                  static_cast<uint64_t>(own.chunks.num_rows) * sizeof(int64_t));
    if (supply.chunks.num_rows > 0) {
      const auto bytes = static_cast<uint64_t>(supply.chunks.num_rows) * sizeof(int64_t);
      supply.request.buffer = relay_.buffer(bytes);
      supply.request.transfer = relay_.receive(supply.node_idx, supply.request.buffer, bytes);
    }
    ask_for_chunks(supply.node_idx);
  }
}

/// What is asked of every node: slots in the order in which they are added.
std::vector<Rail::Buffer> InternodeCombine::list_slots() {
  std::vector<Rail::Buffer> lists(wanted_.size());
  std::vector<int64_t> num_listed(wanted_.size());
  for (size_t i = 0; i < wanted_.size(); ++i)
    if (wanted_[i].chunks.num_rows > 0)
      lists[i] = relay_.buffer(static_cast<uint64_t>(wanted_[i].chunks.num_rows) * sizeof(int64_t));
  request_idx_.resize(plan_.slots.size());
  for (size_t i = 0; pulled_.bytes() > 0 && i < plan_.slots.size(); ++i) {
    const int64_t slot = plan_.slots[i];
    if (slot == Slot::kNone || node_of(slot) == own_node_)
      continue;
    const auto node_idx = static_cast<size_t>(node_of(slot));
    request_idx_[i] = num_listed[node_idx]++;
    assert(request_idx_[i] < wanted_[node_idx].chunks.num_rows);
    reinterpret_cast<int64_t*>(lists[node_idx].get())[request_idx_[i]] = slot;
  }
  for (size_t i = 0; i < wanted_.size(); ++i)
    assert(num_listed[i] == wanted_[i].chunks.num_rows);
  return lists;
}

void InternodeCombine::ask_for_chunks(int node_idx) {
  Wanted& wanted = wanted_[static_cast<size_t>(node_idx)];
  while (wanted.num_asked_chunks < wanted.chunks.num_chunks() &&
         std::ssize(wanted.kept) < InternodeCut::kChunksInFlight) {
    const auto bytes =
        static_cast<uint64_t>(wanted.chunks.rows_of(wanted.num_asked_chunks) * pulled_.bytes());
    Chunk chunk;
    chunk.buffer = relay_.buffer(bytes);
    chunk.transfer = relay_.receive(node_idx, chunk.buffer, bytes);
    wanted.kept.push_back(std::move(chunk));
    ++wanted.num_asked_chunks;
  }
}

bool InternodeCombine::take_chunks() {
  bool has_come = false;
  for (const int node_idx : relay_.nodes()) {
    Wanted& wanted = wanted_[static_cast<size_t>(node_idx)];
    while (true) {
      const int64_t next_idx = wanted.num_here / wanted.chunks.rows_per_chunk;
      if (wanted.num_here == wanted.chunks.num_rows || next_idx == wanted.num_asked_chunks)
        break;
      const Chunk& next = wanted.kept[static_cast<size_t>(next_idx - wanted.num_passed_chunks)];
      if (!relay_.has_moved(next.transfer, node_idx))
        break;
      wanted.num_here += wanted.chunks.rows_of(next_idx);
      has_come = true;
    }
  }
  return has_come;
}

/// End of the tokens from num_passed_tokens_ on whose rows are all here, as many as make one step.
int64_t InternodeCombine::find_ready_end() {
  const int64_t num_slots = plan_.num_slots;
  const int64_t most_tokens =
      std::max<int64_t>(kBytesPerStep / std::max<int64_t>(num_slots * pulled_.bytes(), 1), 1);
  const int64_t end = std::min(plan_.num_tokens, num_passed_tokens_ + most_tokens);
  for (int64_t token_idx = num_passed_tokens_; token_idx < end; ++token_idx) {
    const int64_t first = token_idx * num_slots;
    for (int64_t i = first; pulled_.bytes() > 0 && i < first + num_slots; ++i) {
      const int64_t slot = plan_.slots[static_cast<size_t>(i)];
      if (slot != Slot::kNone && node_of(slot) != own_node_ &&
          request_idx_[static_cast<size_t>(i)] >=
              wanted_[static_cast<size_t>(node_of(slot))].num_here)
        return token_idx;
    }
    for (int64_t i = first; pulled_.bytes() > 0 && i < first + num_slots; ++i) {
      const int64_t slot = plan_.slots[static_cast<size_t>(i)];
      if (slot != Slot::kNone && node_of(slot) != own_node_)
        ++wanted_[static_cast<size_t>(node_of(slot))].num_passed;
    }
  }
  return end;
}

void InternodeCombine::drop_passed_chunks() {
  for (const int node_idx : relay_.nodes()) {
    Wanted& wanted = wanted_[static_cast<size_t>(node_idx)];
    while (!wanted.kept.empty() && wanted.num_passed >= std::min((wanted.num_passed_chunks + 1) *
                                                                     wanted.chunks.rows_per_chunk,
                                                                 wanted.chunks.num_rows)) {
      wanted.kept.pop_front();
      ++wanted.num_passed_chunks;
    }
    ask_for_chunks(node_idx);
  }
}

InternodeCombine::Place InternodeCombine::find(int64_t token_idx, int64_t slot_pos) const {
  const auto slot_idx = static_cast<size_t>(token_idx * plan_.num_slots + slot_pos);
  const Wanted& wanted = wanted_[static_cast<size_t>(node_of(plan_.slots[slot_idx]))];
  const int64_t chunk_idx = request_idx_[slot_idx] / wanted.chunks.rows_per_chunk;
  const int64_t row_idx = request_idx_[slot_idx] % wanted.chunks.rows_per_chunk;
  const std::byte* const chunk =
      wanted.kept[static_cast<size_t>(chunk_idx - wanted.num_passed_chunks)].buffer.get();
  return {offset_ptr(chunk, row_idx, pulled_.row_bytes),
          chunk + wanted.chunks.rows_of(chunk_idx) * pulled_.row_bytes +
              row_idx * pulled_.num_weights * pulled_.weight_bytes};
}

bool InternodeCombine::serve(Supply* supply) {
  if (supply->is_done)
    return false;
  if (!supply->is_request_here && supply->chunks.num_rows > 0) {
    if (!relay_.has_moved(supply->request.transfer, supply->node_idx))
      return false;
    supply->is_request_here = true;
    check_request(*supply);
  }
  bool has_sent = false;
  while (!supply->on_the_way.empty() &&
         relay_.has_moved(supply->on_the_way.front(), supply->node_idx)) {
    supply->on_the_way.pop_front();
    has_sent = true;
  }
  if (supply->num_sent_chunks < supply->chunks.num_chunks()) {
    if (std::ssize(supply->on_the_way) >= InternodeCut::kChunksInFlight)
      return has_sent;
    const auto bytes = static_cast<uint64_t>(supply->chunks.rows_of(supply->num_sent_chunks) *
                                             supply->pulled.bytes());
    Rail::Buffer chunk = relay_.buffer(bytes);
    gather(*supply, chunk.get());
    supply->on_the_way.push_back(relay_.send(supply->node_idx, std::move(chunk), bytes));
    ++supply->num_sent_chunks;
  }
  if (supply->num_sent_chunks == supply->chunks.num_chunks()) {
    relay_.release_done(supply->src_rank);
    supply->request.buffer.reset();
    supply->is_done = true;
  }
  return true;
}

void InternodeCombine::check_request(const Supply& supply) const {
  std::vector<int64_t> num_rows(static_cast<size_t>(nodes_.num_ranks));  // 0 on other nodes
  for (int rank_idx = 0; rank_idx < nodes_.num_ranks; ++rank_idx)
    if (endpoint_.group().is_local(rank_idx))
      num_rows[static_cast<size_t>(rank_idx)] =
          layout::num_window_rows(plan_.counts, endpoint_.placement(), plan_.arrangement, rank_idx);
  const auto* const slots = reinterpret_cast<const int64_t*>(supply.request.buffer.get());
  for (int64_t i = 0; i < supply.chunks.num_rows; ++i) {
    const int rank_idx = Slot::rank_idx(slots[i]);
    if (slots[i] < 0 || rank_idx >= nodes_.num_ranks ||
        Slot::row_idx(slots[i]) >= num_rows[static_cast<size_t>(rank_idx)])
      throw std::runtime_error(concat("rank ",
                                      supply.src_rank,
                                      " asked rank ",
                                      endpoint_.rank_idx(),
                                      " for row ",
                                      Slot::row_idx(slots[i]),
                                      " of rank ",
                                      rank_idx,
                                      ", which node ",
                                      own_node_,
                                      " does not have"));
  }
}

/// Copies the rows of the next chunk, then their weights.
void InternodeCombine::gather(const Supply& supply, std::byte* chunk) {
  const PulledRow& pulled = supply.pulled;
  const int64_t first = supply.num_sent_chunks * supply.chunks.rows_per_chunk;
  const int64_t count = supply.chunks.rows_of(supply.num_sent_chunks);
  const auto* const slots = reinterpret_cast<const int64_t*>(supply.request.buffer.get()) + first;
  const int64_t weights_per_place =
      plan_.arrangement.is_by_rank() ? plan_.num_recv_topk : int64_t{1};
  const int64_t weights_bytes = pulled.num_weights * pulled.weight_bytes;
  std::byte* const weights = chunk + count * pulled.row_bytes;
  endpoint_.for_tokens(count, count * pulled.bytes(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto rank_idx = static_cast<size_t>(Slot::rank_idx(slots[i]));
      const int64_t row_idx = Slot::row_idx(slots[i]);
      // Not past the caches: the engine reads them next.
      if (pulled.row_bytes > 0)
        sync::pull_shared(offset_ptr(chunk, i, pulled.row_bytes),
                          offset_ptr(bases_.rows[rank_idx], row_idx, pulled.row_bytes),
                          static_cast<size_t>(pulled.row_bytes));
      if (weights_bytes > 0)
        sync::pull_shared(
            offset_ptr(weights, i, weights_bytes),
            bases_.weights[rank_idx] + row_idx * weights_per_place * pulled.weight_bytes,
            static_cast<size_t>(weights_bytes));
    }
  });
  // Nothing of an owner that had given up by then is sent on: its source could not hear of that in
  // time.
  sync::fence_acquire();
  endpoint_.group().check_abort();
  sync::confirm_pulls();
}

bool InternodeCombine::is_finished() const {
  return num_passed_tokens_ == plan_.num_tokens &&
         std::all_of(supplies_.begin(), supplies_.end(), [](const Supply& supply) {
           return supply.is_done;
         });
}

/// Until any transfer that something waits for has ended.
void InternodeCombine::wait() {
  std::vector<std::pair<int, Relay::Transfer>> awaited;
  for (const int node_idx : relay_.nodes()) {
    const Wanted& wanted = wanted_[static_cast<size_t>(node_idx)];
    const int64_t next_idx = wanted.num_here / wanted.chunks.rows_per_chunk;
    if (wanted.num_here < wanted.chunks.num_rows && next_idx < wanted.num_asked_chunks)
      awaited.emplace_back(
          node_idx, wanted.kept[static_cast<size_t>(next_idx - wanted.num_passed_chunks)].transfer);
  }
  for (const auto& supply : supplies_) {
    if (supply.is_done)
      continue;
    awaited.emplace_back(
        supply.node_idx,
        supply.is_request_here ? supply.on_the_way.front() : supply.request.transfer);
  }
  relay_.wait(awaited.front().first, [&] {
    return std::any_of(awaited.begin(), awaited.end(), [](const auto& entry) {
      return has_moved_or_failed(entry.second);
    });
  });
}

}  // namespace moe::host
