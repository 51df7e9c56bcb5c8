#include "ops/relay.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "cpu/crc32c.h"
#include "layout/token_sets.h"
#include "ops/exchange.h"

namespace moe::ops {

using layout::MessageId;
using layout::Row;
using layout::SecondOffer;

Relay::Relay(Endpoint& endpoint, Exchange& exchange)
    : endpoint_(endpoint),
      exchange_(exchange),
      group_(endpoint.group()),
      rail_(endpoint.rail()),
      checksum_bytes_(endpoint.config().checks_messages ? uint64_t{MessageId::kChecksumBytes} : 0),
      num_sent_(static_cast<size_t>(group_.nodes().num_nodes())),
      num_received_(num_sent_.size()) {
  const NodeLayout& nodes = group_.nodes();
  for (int node_idx = 0; node_idx < nodes.num_nodes(); ++node_idx)
    if (node_idx != nodes.node_idx(group_.rank_idx()) && group_.is_active(rail_rank(node_idx)))
      nodes_.push_back(node_idx);
}

int Relay::rail_rank(int node_idx) const {
  return group_.nodes().rail_rank(group_.rank_idx(), node_idx);
}

namespace {

/// Bytes of the sets of tokens that come behind a row.
uint64_t set_bytes(const std::byte* image) {
  Row header;
  std::memcpy(&header, image, sizeof(header));
  const bool is_dispatch =
      header.arguments.operation == static_cast<int32_t>(layout::Operation::kDispatch);
  return is_dispatch ? header.weights_offer.bytes : 0;
}

}  // namespace

void Relay::exchange_row(const std::byte* image, const std::byte* sets) {
  const auto bytes =
      static_cast<uint64_t>(Row::stride(group_.num_ranks(), endpoint_.config().num_experts));
  send_to_all(image, bytes);
  if (sets != nullptr)
    send_to_all(sets, set_bytes(image));
  for (const int node_idx : nodes_) {
    Rail::Buffer theirs = buffer(bytes);
    const Transfer transfer = receive(node_idx, theirs, bytes);
    incoming_.push_back({node_idx, transfer, std::move(theirs), true, nullptr});
  }
}

void Relay::send_second_offer(const SecondOffer& second) {
  send_to_all(reinterpret_cast<const std::byte*>(&second), sizeof(second));
}

void Relay::send_to_all(const std::byte* message, uint64_t bytes) {
  for (const int node_idx : nodes_) {
    Rail::Buffer copy = buffer(bytes);  // each has a checksum of its own
    std::memcpy(copy.get(), message, bytes);
    send(node_idx, std::move(copy), bytes);
  }
}

void Relay::expect_second_offers(const std::vector<int>& short_ranks) {
  for (const int node_idx : nodes_) {
    if (std::find(short_ranks.begin(), short_ranks.end(), rail_rank(node_idx)) == short_ranks.end())
      continue;
    Rail::Buffer offer = buffer(sizeof(SecondOffer));
    const Transfer transfer = receive(node_idx, offer, sizeof(SecondOffer));
    incoming_.push_back({node_idx, transfer, std::move(offer), false, nullptr});
  }
}

void Relay::pump() {
  for (size_t i = 0; i < incoming_.size();) {
    if (!has_moved(incoming_[i].transfer, incoming_[i].node_idx)) {
      ++i;
      continue;
    }
    Incoming moved = std::move(incoming_[i]);
    incoming_.erase(incoming_.begin() + static_cast<std::ptrdiff_t>(i));
    relay(std::move(moved));
  }
}

void Relay::relay(Incoming incoming) {
  const int src_rank = rail_rank(incoming.node_idx);
  if (incoming.is_row) {
    if (incoming.sets == nullptr)
      check_row(src_rank, incoming.buffer.get());
    if (set_bytes(incoming.buffer.get()) > 0)
      relay_sets(std::move(incoming));
    else
      exchange_.store_row(src_rank, incoming.buffer.get());
    return;
  }
  SecondOffer second;
  std::memcpy(&second, incoming.buffer.get(), sizeof(second));
  exchange_.store_second_offer(src_rank, second);
}

std::vector<int32_t> Relay::counts_of(const std::byte* image) const {
  std::vector<int32_t> counts(
      static_cast<size_t>(Row::num_counts(group_.num_ranks(), endpoint_.config().num_experts)));
  std::memcpy(counts.data(), image + sizeof(Row), counts.size() * sizeof(int32_t));
  return counts;
}

/// Has them received, then offers them in the heap with their row.
void Relay::relay_sets(Incoming incoming) {
  const int src_rank = rail_rank(incoming.node_idx);
  std::byte* const image = incoming.buffer.get();
  Row header;
  std::memcpy(&header, image, sizeof(header));
  const uint64_t bytes = set_bytes(image);
  if (incoming.sets == nullptr) {
    const layout::TokenSetMap most{group_.num_ranks(),
                                   endpoint_.config().num_experts,
                                   layout::TokenSetMap::words_of(header.num_tokens)};
    if (bytes > most.bytes(layout::TokenSetMap::most_planes(counts_of(image).back())))
      throw std::runtime_error(describe_other_choices(src_rank));
    incoming.sets = buffer(bytes);
    incoming.transfer = receive(incoming.node_idx, incoming.sets, bytes);
    incoming_.push_back(std::move(incoming));
    return;
  }
  if (replicas_ != nullptr)
    check_sets(src_rank, incoming);
  const std::shared_ptr<Window> window = exchange_.allocate(bytes);
  sync::write_shared(window->data(), incoming.sets.get(), bytes);
  endpoint_.keep_readable(exchange_.epoch(), window);
  header.weights_offer = window->offer();
  std::memcpy(image, &header, sizeof(header));
  exchange_.store_row(src_rank, image);
}

void Relay::check_sets(int src_rank, const Incoming& incoming) const {
  Row header;
  std::memcpy(&header, incoming.buffer.get(), sizeof(header));
  const uint64_t bytes = set_bytes(incoming.buffer.get());
  const std::vector<int32_t> counts = counts_of(incoming.buffer.get());
  const auto map = layout::TokenSetMap::make(*replicas_, endpoint_.placement(), header.num_tokens);
  std::vector<uint64_t> sets(bytes / sizeof(uint64_t));
  std::memcpy(sets.data(), incoming.sets.get(), bytes);
  // Whatever the shares will be: all to the first slots.
  std::vector<int32_t> first(counts.size());
  for (int expert_idx = 0; expert_idx < replicas_->num_experts(); ++expert_idx)
    first[static_cast<size_t>(replicas_->slots.of_expert(expert_idx).front())] =
        counts[static_cast<size_t>(expert_idx)];
  if (!map.may_have(bytes, counts.back()) ||
      !layout::count_tokens(sets, map, *replicas_, endpoint_.placement(), first.data()))
    throw std::runtime_error(describe_other_choices(src_rank));
}

/// Counts from which memory is laid out, before any rank of this node sees them. What they say
/// together is judged by all.
void Relay::check_row(int src_rank, const std::byte* image) const {
  Row header;
  std::memcpy(&header, image, sizeof(header));
  if (header.status != static_cast<int32_t>(layout::RowStatus::kOk) ||
      header.arguments.operation != static_cast<int32_t>(layout::Operation::kDispatch))
    return;
  const std::string problem = layout::describe_bad_counts(counts_of(image).data(),
                                                          header.num_tokens,
                                                          group_.num_ranks(),
                                                          endpoint_.config().num_experts);
  if (!problem.empty())
    throw std::runtime_error(concat("rank ", src_rank, " says that ", problem));
}

Relay::Transfer Relay::send(int node_idx, Rail::Buffer buffer, uint64_t bytes) {
  // A transfer may keep its memory for as long as somebody keeps it.
  std::erase_if(outgoing_, [this](const Outgoing& outgoing) {
    return has_moved(outgoing.transfer, outgoing.node_idx);
  });
  if (checksum_bytes_ > 0) {
    const uint32_t message_idx = num_sent_[static_cast<size_t>(node_idx)]++;
    const uint32_t sum = checksum(group_.rank_idx(), message_idx, buffer.get(), bytes);
    std::memcpy(buffer.get() + bytes, &sum, sizeof(sum));
  }
  Transfer transfer = rail_.send(node_idx, std::move(buffer), 0, bytes + checksum_bytes_);
  outgoing_.push_back({node_idx, transfer});
  return transfer;
}

Relay::Transfer Relay::receive(int node_idx, Rail::Buffer buffer, uint64_t bytes) {
  if (checksum_bytes_ == 0)
    return rail_.receive(node_idx, std::move(buffer), 0, bytes);
  Transfer transfer = rail_.receive(node_idx, buffer, 0, bytes + checksum_bytes_);
  const uint32_t message_idx = num_received_[static_cast<size_t>(node_idx)]++;
  unchecked_.push_back({transfer, std::move(buffer), bytes, message_idx});
  return transfer;
}

uint32_t Relay::checksum(int src_rank,
                         uint32_t message_idx,
                         const std::byte* message,
                         uint64_t bytes) const {
  const MessageId id{exchange_.epoch(), static_cast<uint32_t>(src_rank), message_idx};
  const auto& crc = cpu::best_crc32c();
  return crc.extend(
      crc.extend(0, reinterpret_cast<const std::byte*>(&id), sizeof(id)), message, bytes);
}

void Relay::check(const Transfer& transfer, int node_idx) {
  const auto found = std::find_if(unchecked_.begin(), unchecked_.end(), [&](const auto& entry) {
    return entry.transfer == transfer;
  });
  if (found == unchecked_.end())
    return;  // sent, or looked at before
  const Unchecked message = std::move(*found);
  unchecked_.erase(found);
  const int src_rank = rail_rank(node_idx);
  uint32_t expected = 0;
  std::memcpy(&expected, message.buffer.get() + message.bytes, sizeof(expected));
  const uint32_t sum = checksum(src_rank, message.message_idx, message.buffer.get(), message.bytes);
  if (sum != expected)
    exchange_.abort_rail(src_rank,
                         concat(rail_.name(),
                                ": message ",
                                message.message_idx,
                                " of rank ",
                                src_rank,
                                ", ",
                                message.bytes,
                                " bytes, was damaged on the way to rank ",
                                group_.rank_idx(),
                                ": its checksum is ",
                                sum,
                                ", the one that came with it ",
                                expected));
}

bool Relay::has_moved(const Transfer& transfer, int node_idx) {
  switch (transfer->state()) {
    case Rail::State::kMoving:
      return false;
    case Rail::State::kMoved:
      check(transfer, node_idx);
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
