#include "ops/internode_combine.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "core/math.h"

namespace moe::ops {

namespace {

using layout::InternodeCut;
using layout::PullChunks;
using layout::PulledRow;
using layout::Slot;
using layout::SumRequest;

template <typename Scalar>
constexpr Scalar kOne = 1;

// Rows added at one go, so that other nodes are served meanwhile.
constexpr int64_t kBytesPerStep = int64_t{4} << 20;

PulledRow pulled_by(const Plan& plan, PulledRow pulled, int src_rank) {
  if (plan.arrangement.is_by_rank())
    pulled.num_weights = plan.counts.num_topk(src_rank);
  return pulled;
}

/// Bytes of one message: rows, then the weights of the rows that were asked for.
/// @param first_request  First requests, as in NodeRequest.
int64_t chunk_bytes(const PulledRow& pulled,
                    const PullChunks& chunks,
                    const std::vector<int64_t>& first_request,
                    int64_t chunk_idx) {
  const int64_t num_rows = chunks.rows_of(chunk_idx);
  if (first_request.empty())
    return num_rows * pulled.bytes();
  const auto first = static_cast<size_t>(chunk_idx * chunks.rows_per_chunk);
  const int64_t num_requested =
      first_request[first + static_cast<size_t>(num_rows)] - first_request[first];
  return num_rows * pulled.row_bytes + num_requested * pulled.weights_bytes();
}

bool has_moved_or_failed(const Relay::Transfer& transfer) {
  return transfer->state() != Rail::State::kMoving;
}

}  // namespace

bool InternodeCombine::is_pulled_here(const Plan& plan, const group::Group& group, int rank_idx) {
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
                                   const PullBases& bases,
                                   const std::optional<Addition>& addition)
    : endpoint_(endpoint),
      plan_(plan),
      exchange_(exchange),
      relay_(*exchange.relay()),
      nodes_(endpoint.group().nodes()),
      own_node_(nodes_.node_idx(endpoint.rank_idx())),
      pulled_(pulled_by(plan, pulled, endpoint.rank_idx())),
      bases_(bases),
      addition_(addition),
      wanted_(static_cast<size_t>(nodes_.num_nodes())) {
  for (const int node_idx : relay_.nodes()) {
    NodeRequest& wanted = wanted_[static_cast<size_t>(node_idx)];
    wanted.num_requested = num_requested(pulled_, endpoint.rank_idx(), node_idx);
    wanted.chunks = cut_rows(pulled_, wanted.num_requested);
    PendingRows pending;
    pending.node_idx = node_idx;
    pending.src_rank = relay_.rail_rank(node_idx);
    pending.pulled = pulled_by(plan, pulled, pending.src_rank);
    pending.num_requested = num_requested(pending.pulled, pending.src_rank, own_node_);
    pending.chunks = cut_rows(pending.pulled, pending.num_requested);
    pending_.push_back(std::move(pending));
  }
}

int64_t InternodeCombine::num_requested(const PulledRow& pulled, int src_rank, int node_idx) const {
  if (pulled.bytes() == 0)
    return 0;
  return layout::num_rows_on_node(
      plan_.counts, endpoint_.placement(), plan_.arrangement, nodes_, src_rank, node_idx);
}

PullChunks InternodeCombine::cut_rows(const PulledRow& pulled, int64_t num_rows) const {
  return PullChunks::make(pulled, num_rows, plan_.num_recv_topk, nodes_.num_nodes());
}

PullChunks InternodeCombine::cut_sums(const PulledRow& pulled, int64_t num_sums) const {
  return PullChunks::of_sums(pulled, num_sums, plan_.num_recv_topk, nodes_.num_nodes());
}

int64_t InternodeCombine::request_bytes(int64_t num_requested) const {
  return SumRequest{num_requested, addition_ ? addition_->weight_bytes : 0}.bytes();
}

void InternodeCombine::run(const std::function<void(int64_t, int64_t)>& add_tokens) {
  ask();
  while (!is_finished()) {
    bool is_moving = take_chunks();
    // Others first: what they wait for has further to go.
    for (auto& pending : pending_)
      is_moving |= serve(&pending);
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
  for (auto& pending : pending_) {
    const auto& own = wanted_[static_cast<size_t>(pending.node_idx)];
    if (own.num_requested > 0)
      relay_.send(pending.node_idx,
                  slots[static_cast<size_t>(pending.node_idx)],
                  static_cast<uint64_t>(request_bytes(own.num_requested)));
    if (pending.num_requested > 0) {
      const auto bytes = static_cast<uint64_t>(request_bytes(pending.num_requested));
      pending.request.buffer = relay_.buffer(bytes);
      pending.request.transfer = relay_.receive(pending.node_idx, pending.request.buffer, bytes);
    }
    ask_for_chunks(pending.node_idx);
  }
}

/// Lists what is asked of every node: slots in the order in which they are added.
std::vector<Rail::Buffer> InternodeCombine::list_slots() {
  std::vector<Rail::Buffer> lists(wanted_.size());
  for (size_t i = 0; i < wanted_.size(); ++i)
    if (wanted_[i].num_requested > 0)
      lists[i] = relay_.buffer(static_cast<uint64_t>(request_bytes(wanted_[i].num_requested)));
  requested_.resize(plan_.slots.size());
  std::vector<int64_t> num_listed(wanted_.size());
  std::vector<int64_t> last_token(wanted_.size(), -1);
  for (size_t i = 0; pulled_.bytes() > 0 && i < plan_.slots.size(); ++i) {
    const int64_t slot = plan_.slots[i];
    if (slot == Slot::kNone || node_of(slot) == own_node_)
      continue;
    const auto node_idx = static_cast<size_t>(node_of(slot));
    NodeRequest& wanted = wanted_[node_idx];
    const int64_t request_idx = num_listed[node_idx]++;
    assert(request_idx < wanted.num_requested);
    requested_[i] = {request_idx, request_idx};
    reinterpret_cast<int64_t*>(lists[node_idx].get())[request_idx] = slot;
    if (!addition_)
      continue;
    const auto token_idx = static_cast<int64_t>(i) / plan_.num_slots;
    if (std::exchange(last_token[node_idx], token_idx) != token_idx) {
      wanted.first_request.push_back(request_idx);
      reinterpret_cast<int64_t*>(lists[node_idx].get())[request_idx] |= Slot::kFirstOfToken;
    }
    requested_[i].row_idx = std::ssize(wanted.first_request) - 1;
    list_weight(static_cast<int64_t>(i),
                lists[node_idx].get() + request_weight_at(wanted.num_requested, request_idx));
  }
  for (size_t i = 0; i < wanted_.size(); ++i) {
    assert(num_listed[i] == wanted_[i].num_requested);
    if (!addition_ || num_listed[i] == 0)
      continue;
    wanted_[i].chunks = cut_sums(pulled_, std::ssize(wanted_[i].first_request));
    wanted_[i].first_request.push_back(num_listed[i]);
  }
  return lists;
}

/// The weight of a slot, one where none are applied.
void InternodeCombine::list_weight(int64_t slot_idx, std::byte* weight) const {
  const auto bytes = static_cast<size_t>(addition_->weight_bytes);
  if (addition_->weights != nullptr)
    std::memcpy(weight, offset_ptr(addition_->weights, slot_idx, addition_->weight_bytes), bytes);
  else if (bytes == sizeof(double))
    std::memcpy(weight, &kOne<double>, bytes);
  else if (bytes == sizeof(float))
    std::memcpy(weight, &kOne<float>, bytes);
}

void InternodeCombine::ask_for_chunks(int node_idx) {
  NodeRequest& wanted = wanted_[static_cast<size_t>(node_idx)];
  while (wanted.num_asked_chunks < wanted.chunks.num_chunks() &&
         std::ssize(wanted.kept) < InternodeCut::kChunksInFlight) {
    const auto bytes = static_cast<uint64_t>(
        chunk_bytes(pulled_, wanted.chunks, wanted.first_request, wanted.num_asked_chunks));
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
    NodeRequest& wanted = wanted_[static_cast<size_t>(node_idx)];
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
          requested_[static_cast<size_t>(i)].row_idx >=
              wanted_[static_cast<size_t>(node_of(slot))].num_here)
        return token_idx;
    }
    for (int64_t i = first; pulled_.bytes() > 0 && i < first + num_slots; ++i) {
      const int64_t slot = plan_.slots[static_cast<size_t>(i)];
      if (slot != Slot::kNone && node_of(slot) != own_node_)
        wanted_[static_cast<size_t>(node_of(slot))].num_passed =
            requested_[static_cast<size_t>(i)].row_idx + 1;
    }
  }
  return end;
}

void InternodeCombine::drop_passed_chunks() {
  for (const int node_idx : relay_.nodes()) {
    NodeRequest& wanted = wanted_[static_cast<size_t>(node_idx)];
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
  const NodeRequest& wanted = wanted_[static_cast<size_t>(node_of(plan_.slots[slot_idx]))];
  const auto [request_idx, row_idx] = requested_[slot_idx];
  const int64_t chunk_idx = row_idx / wanted.chunks.rows_per_chunk;
  const int64_t first_row = chunk_idx * wanted.chunks.rows_per_chunk;
  const int64_t first_request =
      addition_ ? wanted.first_request[static_cast<size_t>(first_row)] : first_row;
  const std::byte* const chunk =
      wanted.kept[static_cast<size_t>(chunk_idx - wanted.num_passed_chunks)].buffer.get();
  return {offset_ptr(chunk, row_idx - first_row, pulled_.row_bytes),
          chunk + wanted.chunks.rows_of(chunk_idx) * pulled_.row_bytes +
              (request_idx - first_request) * pulled_.weights_bytes()};
}

bool InternodeCombine::serve(PendingRows* pending) {
  if (pending->is_done)
    return false;
  if (!pending->is_request_here && pending->num_requested > 0) {
    if (!relay_.has_moved(pending->request.transfer, pending->node_idx))
      return false;
    pending->is_request_here = true;
    if (addition_)
      read_sum_request(pending);
    check_request(*pending);
  }
  bool has_sent = false;
  while (!pending->on_the_way.empty() &&
         relay_.has_moved(pending->on_the_way.front(), pending->node_idx)) {
    pending->on_the_way.pop_front();
    has_sent = true;
  }
  if (pending->num_sent_chunks < pending->chunks.num_chunks()) {
    if (std::ssize(pending->on_the_way) >= InternodeCut::kChunksInFlight)
      return has_sent;
    const auto bytes = static_cast<uint64_t>(chunk_bytes(
        pending->pulled, pending->chunks, pending->first_request, pending->num_sent_chunks));
    Rail::Buffer chunk = relay_.buffer(bytes);
    gather(*pending, chunk.get());
    pending->on_the_way.push_back(relay_.send(pending->node_idx, std::move(chunk), bytes));
    ++pending->num_sent_chunks;
  }
  if (pending->num_sent_chunks == pending->chunks.num_chunks()) {
    relay_.release_done(pending->src_rank);
    pending->request.buffer.reset();
    pending->is_done = true;
  }
  return true;
}

void InternodeCombine::check_request(const PendingRows& pending) const {
  std::vector<int64_t> num_rows(static_cast<size_t>(nodes_.num_ranks));  // 0 without a base
  for (int rank_idx = 0; rank_idx < nodes_.num_ranks; ++rank_idx)
    if (is_pulled_here(plan_, endpoint_.group(), rank_idx))
      num_rows[static_cast<size_t>(rank_idx)] =
          layout::num_window_rows(plan_.counts, endpoint_.placement(), plan_.arrangement, rank_idx);
  const auto* const slots = reinterpret_cast<const int64_t*>(pending.request.buffer.get());
  for (int64_t i = 0; i < pending.num_requested; ++i) {
    const int rank_idx = Slot::rank_idx(slots[i]);
    if (slots[i] < 0 || rank_idx >= nodes_.num_ranks ||
        Slot::row_idx(slots[i]) >= num_rows[static_cast<size_t>(rank_idx)])
      throw std::runtime_error(concat("rank ",
                                      pending.src_rank,
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

/// Reads where the tokens of a request begin; the rest of it are slots.
void InternodeCombine::read_sum_request(PendingRows* pending) const {
  auto* const slots = reinterpret_cast<int64_t*>(pending->request.buffer.get());
  std::vector<int64_t>& first_request = pending->first_request;
  for (int64_t i = 0; i < pending->num_requested; ++i) {
    if ((slots[i] & Slot::kFirstOfToken) != 0)
      first_request.push_back(i);
    const int64_t num_of_token = first_request.empty() ? 0 : i + 1 - first_request.back();
    if (num_of_token < 1 || num_of_token > plan_.num_recv_topk)
      throw std::runtime_error(
          concat("rank ",
                 pending->src_rank,
                 " asked rank ",
                 endpoint_.rank_idx(),
                 num_of_token < 1 ? " for a row of no token" : " for more rows of a token than ",
                 num_of_token < 1 ? "" : concat(plan_.num_recv_topk)));
    slots[i] &= ~Slot::kFirstOfToken;
  }
  pending->chunks = cut_sums(pending->pulled, std::ssize(first_request));
  first_request.push_back(pending->num_requested);
}

/// Copies or adds the rows of the next chunk, then copies weights.
void InternodeCombine::gather(const PendingRows& pending, std::byte* chunk) {
  const PulledRow& pulled = pending.pulled;
  const int64_t first = pending.num_sent_chunks * pending.chunks.rows_per_chunk;
  const int64_t count = pending.chunks.rows_of(pending.num_sent_chunks);
  const auto request_of = [&](int64_t row_idx) {
    return addition_ ? pending.first_request[static_cast<size_t>(row_idx)] : row_idx;
  };
  const int64_t first_request = request_of(first);
  const int64_t num_requested = request_of(first + count) - first_request;
  const int64_t read_bytes = num_requested * pulled.bytes();
  endpoint_.for_tokens(count, read_bytes, [&](int64_t begin, int64_t end) {
    if (addition_)
      add_rows(pending, first + begin, first + end, offset_ptr(chunk, begin, pulled.row_bytes));
    else
      copy_rows(pending, first + begin, first + end, offset_ptr(chunk, begin, pulled.row_bytes));
    copy_weights(pending,
                 request_of(first + begin),
                 request_of(first + end),
                 chunk + count * pulled.row_bytes +
                     (request_of(first + begin) - first_request) * pulled.weights_bytes());
  });
  // Nothing of an owner that had given up by then is sent on: its source could not hear of that in
  // time.
  sync::fence_acquire();
  endpoint_.group().check_abort();
  sync::confirm_pulls();
}

void InternodeCombine::copy_rows(const PendingRows& pending,
                                 int64_t begin,
                                 int64_t end,
                                 std::byte* rows) const {
  const int64_t row_bytes = pending.pulled.row_bytes;
  const auto* const slots = reinterpret_cast<const int64_t*>(pending.request.buffer.get());
  // Not past the caches: the engine reads them next.
  for (int64_t i = begin; row_bytes > 0 && i < end; ++i)
    sync::pull_shared(offset_ptr(rows, i - begin, row_bytes),
                      row_at(slots[i], row_bytes),
                      static_cast<size_t>(row_bytes));
}

/// Sums of the tokens [begin, end) of a request.
void InternodeCombine::add_rows(const PendingRows& pending,
                                int64_t begin,
                                int64_t end,
                                std::byte* sums) const {
  const cpu::FloatingPointScope scope;
  const int64_t row_bytes = pending.pulled.row_bytes;
  const std::byte* const request = pending.request.buffer.get();
  const auto* const slots = reinterpret_cast<const int64_t*>(request);
  std::vector<const std::byte*> rows;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = pending.first_request[static_cast<size_t>(i)];
    const int64_t last = pending.first_request[static_cast<size_t>(i) + 1];
    rows.clear();
    for (int64_t k = first; k < last; ++k)
      rows.push_back(row_at(slots[k], row_bytes));
    endpoint_.kernels().sum_rows(addition_->dtype,
                                 rows.data(),
                                 addition_->weight_bytes > 0
                                     ? request + request_weight_at(pending.num_requested, first)
                                     : nullptr,
                                 static_cast<int>(rows.size()),
                                 addition_->hidden,
                                 offset_ptr(sums, i - begin, row_bytes),
                                 cpu::StoreMode::kCached,
                                 nullptr,
                                 0);
  }
}

/// Weights of the rows [begin, end) of a request.
void InternodeCombine::copy_weights(const PendingRows& pending,
                                    int64_t begin,
                                    int64_t end,
                                    std::byte* weights) const {
  const int64_t weights_bytes = pending.pulled.weights_bytes();
  const int64_t weights_per_place =
      plan_.arrangement.is_by_rank() ? plan_.num_recv_topk : int64_t{1};
  const auto* const slots = reinterpret_cast<const int64_t*>(pending.request.buffer.get());
  for (int64_t i = begin; weights_bytes > 0 && i < end; ++i)
    sync::pull_shared(offset_ptr(weights, i - begin, weights_bytes),
                      offset_ptr(bases_.weights[static_cast<size_t>(Slot::rank_idx(slots[i]))],
                                 Slot::row_idx(slots[i]),
                                 weights_per_place * pending.pulled.weight_bytes),
                      static_cast<size_t>(weights_bytes));
}

bool InternodeCombine::is_finished() const {
  return num_passed_tokens_ == plan_.num_tokens &&
         std::all_of(pending_.begin(), pending_.end(), [](const PendingRows& pending) {
           return pending.is_done;
         });
}

/// Until any transfer that something waits for has ended.
void InternodeCombine::wait() {
  std::vector<std::pair<int, Relay::Transfer>> awaited;
  for (const int node_idx : relay_.nodes()) {
    const NodeRequest& wanted = wanted_[static_cast<size_t>(node_idx)];
    const int64_t next_idx = wanted.num_here / wanted.chunks.rows_per_chunk;
    if (wanted.num_here < wanted.chunks.num_rows && next_idx < wanted.num_asked_chunks)
      awaited.emplace_back(
          node_idx, wanted.kept[static_cast<size_t>(next_idx - wanted.num_passed_chunks)].transfer);
  }
  for (const auto& pending : pending_) {
    if (pending.is_done)
      continue;
    awaited.emplace_back(
        pending.node_idx,
        pending.is_request_here ? pending.on_the_way.front() : pending.request.transfer);
  }
  relay_.wait(awaited.front().first, [&] {
    return std::any_of(awaited.begin(), awaited.end(), [](const auto& entry) {
      return has_moved_or_failed(entry.second);
    });
  });
}

}  // namespace moe::ops
