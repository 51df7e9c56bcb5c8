#include "ops/relay.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ops/exchange.h"

namespace moe::ops {

using layout::Row;
using layout::SecondOffer;

Relay::Relay(Endpoint& endpoint, Exchange& exchange)
    : endpoint_(endpoint), exchange_(exchange), group_(endpoint.group()), rail_(endpoint.rail()) {
  const NodeLayout& nodes = group_.nodes();
  for (int node_idx = 0; node_idx < nodes.num_nodes(); ++node_idx)
    if (node_idx != nodes.node_idx(group_.rank_idx()) && group_.is_active(rail_rank(node_idx)))
      nodes_.push_back(node_idx);
}

int Relay::rail_rank(int node_idx) const {
  return group_.nodes().rail_rank(group_.rank_idx(), node_idx);
}

void Relay::exchange_row(const std::byte* image) {
  const auto bytes =
      static_cast<uint64_t>(Row::stride(group_.num_ranks(), endpoint_.config().num_experts));
  const Rail::Buffer row = buffer(bytes);
  std::memcpy(row.get(), image, bytes);
  for (const int node_idx : nodes_)
    send(node_idx, row, bytes);
  for (const int node_idx : nodes_) {
    Rail::Buffer theirs = buffer(bytes);
    const Transfer transfer = receive(node_idx, theirs, bytes);
    incoming_.push_back({node_idx, transfer, std::move(theirs), true});
  }
}

void Relay::send_second_offer(const SecondOffer& second) {
  const Rail::Buffer offer = buffer(sizeof(second));
  std::memcpy(offer.get(), &second, sizeof(second));
  for (const int node_idx : nodes_)
    send(node_idx, offer, sizeof(second));
}

void Relay::expect_second_offers(const std::vector<int>& short_ranks) {
  for (const int node_idx : nodes_) {
    if (std::find(short_ranks.begin(), short_ranks.end(), rail_rank(node_idx)) == short_ranks.end())
      continue;
    Rail::Buffer offer = buffer(sizeof(SecondOffer));
    const Transfer transfer = receive(node_idx, offer, sizeof(SecondOffer));
    incoming_.push_back({node_idx, transfer, std::move(offer), false});
  }
}

void Relay::pump() {
  for (size_t i = 0; i < incoming_.size();) {
    if (!has_moved(incoming_[i].transfer, incoming_[i].node_idx)) {
      ++i;
      continue;
    }
    relay(incoming_[i]);
    incoming_.erase(incoming_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Relay::relay(const Incoming& incoming) {
  const int src_rank = rail_rank(incoming.node_idx);
  if (incoming.is_row) {
    check_row(src_rank, incoming.buffer.get());
    exchange_.store_row(src_rank, incoming.buffer.get());
    return;
  }
  SecondOffer second;
  std::memcpy(&second, incoming.buffer.get(), sizeof(second));
  exchange_.store_second_offer(src_rank, second);
}

/// Counts from which memory is laid out, before any rank of this node sees them. What they say
/// together is judged by all.
void Relay::check_row(int src_rank, const std::byte* image) const {
  Row header;
  std::memcpy(&header, image, sizeof(header));
  if (header.status != static_cast<int32_t>(layout::RowStatus::kOk) ||
      header.arguments.operation != static_cast<int32_t>(layout::Operation::kDispatch))
    return;
  const int num_experts = endpoint_.config().num_experts;
  std::vector<int32_t> counts(
      static_cast<size_t>(Row::num_counts(group_.num_ranks(), num_experts)));
  std::memcpy(counts.data(), image + sizeof(header), counts.size() * sizeof(int32_t));
  const std::string problem = layout::describe_bad_counts(
      counts.data(), header.num_tokens, group_.num_ranks(), num_experts);
  if (!problem.empty())
    throw std::runtime_error(concat("rank ", src_rank, " says that ", problem));
}

Relay::Transfer Relay::send(int node_idx, Rail::Buffer buffer, uint64_t bytes) {
  // A transfer may keep its memory for as long as somebody keeps it.
  std::erase_if(outgoing_, [this](const Outgoing& outgoing) {
    return has_moved(outgoing.transfer, outgoing.node_idx);
  });
  Transfer transfer = rail_.send(node_idx, std::move(buffer), 0, bytes);
  outgoing_.push_back({node_idx, transfer});
  return transfer;
}

Relay::Transfer Relay::receive(int node_idx, Rail::Buffer buffer, uint64_t bytes) {
  return rail_.receive(node_idx, std::move(buffer), 0, bytes);
}

bool Relay::has_moved(const Transfer& transfer, int node_idx) {
  switch (transfer->state()) {
    case Rail::State::kMoving:
      return false;
    case Rail::State::kMoved:
      return true;
    case Rail::State::kFailed:
      break;
  }
  exchange_.give_up_rail(rail_rank(node_idx), concat(rail_.name(), ": ", transfer->error()));
}

void Relay::wait(int node_idx, const std::function<bool()>& is_ready) {
  exchange_.await_rail(rail_rank(node_idx), is_ready);
}

void Relay::release_done(int src_rank) {
  // Rows are left unwritten once somebody has given up.
  group_.check_abort();
  exchange_.release_done_of(src_rank);
}

void Relay::finish_sends() {
  for (const auto& [node_idx, transfer] : outgoing_)
    wait(node_idx, [&, node = node_idx] { return has_moved(transfer, node); });
  outgoing_.clear();
}

}  // namespace moe::ops
