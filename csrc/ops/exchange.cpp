#include "ops/exchange.h"

#include <cstring>

namespace moe::host {

using layout::Phase;
using layout::Row;
using layout::RowStatus;
using layout::SecondOffer;

Exchange::Exchange(Endpoint& endpoint,
                   layout::Operation operation,
                   const InterruptCheck& interrupt_check)
    : BufferOperation(endpoint, operation, interrupt_check),
      endpoint_(endpoint),
      first_local_rank_(group_.nodes().rank_of(group_.nodes().node_idx(group_.rank_idx()), 0)),
      num_local_ranks_(group_.nodes().num_local_ranks) {
  check_closed();
  if (endpoint_.is_across_nodes())
    relay_ = std::make_unique<Relay>(endpoint_, *this);
  auto& activity = endpoint_.own_workspace().activity();
  sync::store_relaxed(activity.waiting_for, uint32_t{0});
  sync::store_relaxed(activity.core, sync::current_core());
  begin();
}

void Exchange::check_closed() const {
  const auto& workspace = endpoint_.own_workspace();
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    if (peer_rank == group_.rank_idx() || !group_.is_active(peer_rank))
      continue;
    const uint64_t closed_epoch = sync::load_acquire(workspace.closed(peer_rank).epoch);
    // News from another node may be here before the rows of an operation that rank still made.
    if (closed_epoch == 0 || (epoch_ != 0 && epoch_ < closed_epoch))
      continue;
    // It may have closed after an operation whose end this rank has not seen yet.
    if (epoch_ != 0 && sync::load_acquire(workspace.row(epoch_, peer_rank).epoch) >= epoch_)
      continue;
    group_.check_abort();  // it may have destroyed the buffer because of that
    refuse_closed(peer_rank);
  }
}

void Exchange::await_reuse() {
  const auto depth = static_cast<uint64_t>(endpoint_.config().depth);
  if (epoch_ < endpoint_.first_epoch() + depth)
    return;
  const uint64_t former_epoch = epoch_ - depth;
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    if (!group_.is_active(peer_rank))
      continue;
    const auto& done = endpoint_.own_workspace().done(former_epoch, peer_rank);
    await_flag(peer_rank, Phase::kReuse, former_epoch, done.epoch);
  }
}

void Exchange::publish(const RowMessage& message) {
  await_reuse();
  Row header{};
  header.status = static_cast<int32_t>(message.status);
  header.num_tokens = static_cast<int32_t>(message.num_tokens);
  header.arguments = message.arguments;
  header.offer = message.offer;
  header.weights_offer = message.weights_offer;
  header.needed_bytes = message.needed_bytes;
  header.available_bytes = message.available_bytes;
  std::string text;
  if (message.status != RowStatus::kOk) {
    text = message.message.substr(0, Row::kMessageBytes - 1);
    text.resize(Row::kMessageBytes);
  }
  if (relay_ != nullptr) {
    const int64_t stride = Row::stride(group_.num_ranks(), endpoint_.config().num_experts);
    std::vector<std::byte> image(static_cast<size_t>(stride));
    header.epoch = epoch_;
    std::memcpy(image.data(), &header, sizeof(header));
    if (message.status != RowStatus::kOk)
      std::memcpy(image.data() + sizeof(header), text.data(), text.size());
    else if (message.counts != nullptr)
      std::memcpy(image.data() + sizeof(header), message.counts, count_bytes());
    relay_->exchange_row(image.data());
  }
  store_row(group_.rank_idx(), header, [&](Row& row) {
    if (message.status != RowStatus::kOk)
      sync::write_shared(row.message(), text.data(), text.size());
    else if (message.counts != nullptr)
      sync::write_shared(row.counts(), message.counts, count_bytes());
  });
}

template <typename StoreTail>
void Exchange::store_row(int src_rank, const Row& header, StoreTail&& store_tail) {
  for_local_ranks([&](int peer_rank) {
    Row& row = endpoint_.workspace(peer_rank).row(epoch_, src_rank);
    sync::write_body(row, header);
    store_tail(row);
    sync::store_release(row.epoch, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  });
}

void Exchange::store_row(int src_rank, const std::byte* image) {
  Row header;
  std::memcpy(&header, image, sizeof(header));
  const auto tail_bytes =
      static_cast<size_t>(Row::stride(group_.num_ranks(), endpoint_.config().num_experts)) -
      sizeof(header);
  store_row(src_rank, header, [&](Row& row) {
    sync::write_shared(row.message(), image + sizeof(header), tail_bytes);
  });
}

size_t Exchange::count_bytes() const {
  const int num_counts = Row::num_counts(group_.num_ranks(), endpoint_.config().num_experts);
  return sizeof(int32_t) * static_cast<size_t>(num_counts);
}

Rows Exchange::collect(bool with_counts) {
  const int num_ranks = group_.num_ranks();
  Rows rows;
  rows.headers.resize(static_cast<size_t>(num_ranks));
  rows.messages.resize(static_cast<size_t>(num_ranks));
  // Those of this node first: a rank of another is heard of through one of them.
  int peer_rank = first_local_rank_;
  for (int i = 0; i < num_ranks; ++i, peer_rank = peer_rank + 1 == num_ranks ? 0 : peer_rank + 1) {
    if (!group_.is_active(peer_rank))
      continue;
    await_row(peer_rank);
    const Row& row = endpoint_.own_workspace().row(epoch_, peer_rank);
    Row& header = rows.headers[static_cast<size_t>(peer_rank)];
    header.epoch = epoch_;
    sync::read_body(header, row);
    if (header.status != static_cast<int32_t>(RowStatus::kOk)) {
      char text[Row::kMessageBytes];
      sync::read_shared(text, row.message(), sizeof(text));
      rows.messages[static_cast<size_t>(peer_rank)] = text;
    }
  }
  if (const std::exception_ptr error = find_disagreement(rows, group_)) {
    settle();
    std::rethrow_exception(error);
  }
  step_ = Phase::kData;
  if (with_counts) {
    rows.counts = layout::CountMatrix(num_ranks, endpoint_.config().num_experts);
    for (int peer_rank = 0; peer_rank < num_ranks; ++peer_rank)
      if (group_.is_active(peer_rank))
        sync::read_shared(rows.counts.row(peer_rank),
                          endpoint_.own_workspace().row(epoch_, peer_rank).counts(),
                          count_bytes());
  }
  return rows;
}

void Exchange::reject(const layout::OperationArguments& arguments,
                      RowStatus status,
                      const std::string& message) {
  RowMessage row;
  row.arguments = arguments;
  row.status = status;
  row.message = message;
  publish_rejection(row);
}

void Exchange::reject(const layout::OperationArguments& arguments, const CapacityError& error) {
  RowMessage row;
  row.arguments = arguments;
  row.status = RowStatus::kNoCapacity;
  row.message = error.what();
  row.needed_bytes = error.needed_bytes;
  row.available_bytes = error.available_bytes;
  publish_rejection(row);
}

void Exchange::publish_rejection(const RowMessage& row) {
  publish(row);
  collect(false);
  throw std::logic_error("a rejected row was not reported");
}

void Exchange::expect_second_offers(const std::vector<int>& short_ranks) {
  if (relay_ != nullptr)
    relay_->expect_second_offers(short_ranks);
}

void Exchange::publish_second_offer(const Offer& offer,
                                    uint64_t needed_bytes,
                                    uint64_t available_bytes) {
  const SecondOffer body{epoch_, offer, needed_bytes, available_bytes};
  if (relay_ != nullptr)
    relay_->send_second_offer(body);
  store_second_offer(group_.rank_idx(), body);
}

void Exchange::store_second_offer(int src_rank, const SecondOffer& body) {
  for_local_ranks([&](int peer_rank) {
    auto& second = endpoint_.workspace(peer_rank).second_offer(epoch_, src_rank);
    sync::write_body(second, body);
    sync::store_release(second.epoch, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  });
}

SecondOffer Exchange::await_second_offer(int peer_rank) {
  const auto& second = endpoint_.own_workspace().second_offer(epoch_, peer_rank);
  step_ = Phase::kOffers;
  await_flag(peer_rank, Phase::kOffers, epoch_, second.epoch);
  step_ = Phase::kData;
  SecondOffer body{};
  sync::read_body(body, second);
  return body;
}

void Exchange::settle() {
  release_done();
  if (relay_ != nullptr) {
    for (const int node_idx : relay_->nodes())
      release_done_of(relay_->rail_rank(node_idx));
    relay_->finish_sends();
  }
  endpoint_.complete_epoch(epoch_);
  close();
}

void Exchange::complete() {
  if (relay_ != nullptr && is_open())
    relay_->finish_sends();
  BufferOperation::complete();
}

void Exchange::release_done() {
  // What was read from a peer counts only if that peer had not given up by then: it may have
  // overwritten its rows since.
  sync::fence_acquire();
  group_.check_abort();
  sync::confirm_pulls();
  release_done_of(group_.rank_idx());
}

void Exchange::release_done_of(int src_rank) {
  for_local_ranks([&](int peer_rank) {
    auto& done = endpoint_.workspace(peer_rank).done(epoch_, src_rank);
    sync::store_release(done.epoch, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  });
}

void Exchange::await_done(int peer_rank) {
  await_flag(
      peer_rank, Phase::kData, epoch_, endpoint_.own_workspace().done(epoch_, peer_rank).epoch);
}

void Exchange::fail(const std::string& reason) {
  if (!is_open())
    return;
  sync::drop_pulls();
  give_up(reason);
  if (relay_ != nullptr)
    relay_->give_up(reason);
  quarantine_offers();
}

std::shared_ptr<Window> Exchange::allocate(uint64_t bytes) {
  auto& activity = endpoint_.own_workspace().activity();
  sync::store_relaxed(activity.phase, static_cast<int32_t>(Phase::kGrowing));
  try {
    auto window = group_.memory().allocate(bytes);
    sync::store_relaxed(activity.phase, static_cast<int32_t>(Phase::kIdle));
    return window;
  } catch (...) {
    sync::store_relaxed(activity.phase, static_cast<int32_t>(Phase::kIdle));
    throw;
  }
}

std::byte* Exchange::resolve(int peer_rank, const Offer& offer) {
  return group_.resolve(peer_rank, offer, site(Phase::kOffers));
}

void reject_operation(Endpoint& endpoint,
                      layout::Operation operation,
                      RowStatus status,
                      const std::string& message,
                      const InterruptCheck& interrupt_check) {
  run_operation<Exchange>(endpoint, operation, interrupt_check, [&](Exchange& exchange) -> int {
    layout::OperationArguments arguments;
    arguments.operation = static_cast<int32_t>(operation);
    exchange.reject(arguments, status, message);
  });
  throw std::logic_error("a rejected operation ended well");
}

}  // namespace moe::host
