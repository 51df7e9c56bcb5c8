#include "ops/exchange.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/text.h"
#include "layout/token_sets.h"

namespace moe::ops {

using layout::Phase;
using layout::Row;
using layout::RowStatus;
using layout::SecondOffer;

Exchange::Exchange(Endpoint& endpoint,
                   layout::Operation operation,
                   const group::InterruptCheck& interrupt_check)
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

void Exchange::check_closed() {
  BufferOperation::check_closed(
      [this](int peer_rank) { return endpoint_.closed_epoch(peer_rank); });
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
  endpoint_.drop_readable(former_epoch);
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
  char text[Row::kMessageBytes];
  if (message.status != RowStatus::kOk)
    store_text(text, message.message);
  if (relay_ != nullptr) {
    const int64_t stride = Row::stride(group_.num_ranks(), endpoint_.config().num_experts);
    std::vector<std::byte> image(static_cast<size_t>(stride));
    header.epoch = epoch_;
    std::memcpy(image.data(), &header, sizeof(header));
    if (message.status != RowStatus::kOk)
      std::memcpy(image.data() + sizeof(header), text, sizeof(text));
    else if (message.counts != nullptr)
      std::memcpy(image.data() + sizeof(header), message.counts, count_bytes());
    relay_->exchange_row(image.data(), message.sets);
  }
  store_row(group_.rank_idx(), header, [&](Row& row) {
    if (message.status != RowStatus::kOk)
      sync::write_shared(row.message(), text, sizeof(text));
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
  });
  ring_local_ranks();
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
  rows.problems.resize(static_cast<size_t>(num_ranks));
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
      text[sizeof(text) - 1] = '\0';
      rows.problems[static_cast<size_t>(peer_rank)] = {
          static_cast<RowStatus>(header.status), text, header.needed_bytes, header.available_bytes};
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

void Exchange::count_tokens(const std::vector<uint64_t>& own_sets,
                            const layout::Replicas& replicas,
                            Rows* rows) {
  const auto num_ranks = static_cast<size_t>(group_.num_ranks());
  std::vector<const std::byte*> offered(num_ranks);
  int64_t num_bytes = 0;
  for (size_t r = 0; r < num_ranks; ++r) {
    const auto peer_rank = static_cast<int>(r);
    const Offer& offer = rows->headers[r].weights_offer;
    num_bytes += static_cast<int64_t>(offer.bytes);
    if (peer_rank != group_.rank_idx() && offer.bytes > 0)
      offered[r] = resolve(watched_rank(peer_rank), offer);
  }
  std::atomic<int> other_rank{-1};
  const auto count = [&](int peer_rank) {
    const Row& header = rows->headers[static_cast<size_t>(peer_rank)];
    const auto map = layout::TokenSetMap::make(replicas, endpoint_.placement(), header.num_tokens);
    const uint64_t bytes = header.weights_offer.bytes;
    std::vector<uint64_t> read;
    if (peer_rank != group_.rank_idx()) {
      if (!map.may_have(bytes, rows->counts.num_topk(peer_rank)))
        return false;
      read.resize(bytes / sizeof(uint64_t));
      if (bytes > 0)
        sync::read_shared(read.data(), offered[static_cast<size_t>(peer_rank)], bytes);
    }
    return layout::count_tokens(peer_rank == group_.rank_idx() ? own_sets : read,
                                map,
                                replicas,
                                endpoint_.placement(),
                                rows->counts.row(peer_rank));
  };
  endpoint_.for_tokens(group_.num_ranks(), num_bytes, [&](int64_t first, int64_t end) {
    for (auto peer_rank = static_cast<int>(first); peer_rank < end; ++peer_rank)
      if (!count(peer_rank))
        other_rank = peer_rank;
  });
  if (other_rank < 0)
    return;
  // A rank that has given up may have used the memory for something else.
  group_.check_abort();
  throw std::runtime_error(describe_other_choices(other_rank));
}

void Exchange::exchange_rejection(const RowMessage& row) {
  publish(row);
  collect(false);
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
  });
  ring_local_ranks();
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
  consume();
}

void Exchange::complete() {
  if (relay_ != nullptr && is_open())
    relay_->finish_sends();
  BufferOperation::complete();
}

void Exchange::release_done() {
  // Bytes read from a peer count only if that peer had not given up by then: it may have
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
  });
  ring_local_ranks();
}

void Exchange::ring_local_ranks() {
  // A fence waits until lines of peers have come: once, where each peer has a flag of its own.
  sync::fence_seq_cst();
  for_local_ranks([&](int peer_rank) { sync::wake(group_.doorbell(peer_rank)); });
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

// ---- What an operation waits for: rows, which may come late, and flags of peers that have
// entered.

template <typename IsMissing>
group::WaitLadder Exchange::ladder_for(const IsMissing& is_missing) {
  // This rank has its core alone, also where ranks outnumber cores, once all that share it have
  // done their part: to yield would only go round among waiters, and each turn costs them their
  // caches.
  const uint32_t own_core = sync::current_core();
  bool keeps_peer = false;
  for_local_ranks([&](int peer_rank) {
    keeps_peer = keeps_peer ||
                 (peer_rank != group_.rank_idx() &&
                  sync::load_relaxed(endpoint_.workspace(peer_rank).activity().core) == own_core &&
                  is_missing(peer_rank));
  });
  if (keeps_peer)
    return group::wait_ladder_on_core_of_peer(group_.has_spare_cores());
  return group::wait_ladder(group_.has_spare_cores() ||
                            relay_ == nullptr);  // a rail may have threads
}

void Exchange::await_row(int peer_rank) {
  const Row& row = endpoint_.own_workspace().row(epoch_, peer_rank);
  const auto ready = [&] {
    if (relay_ != nullptr)
      relay_->pump();
    return sync::load_acquire(row.epoch) >= epoch_;
  };
  if (ready()) [[likely]]
    return;
  const auto is_missing = [&](int rank_idx) {
    return sync::load_acquire(endpoint_.own_workspace().row(epoch_, rank_idx).epoch) < epoch_;
  };
  const group::WaitSite where = site(Phase::kRows);
  group::ArrivalWatch arrival(group_, where, peer_rank);
  group::GoneWatch gone;
  group::await_peer(group_, ladder_for(is_missing), where, ready, [&](int64_t now_ns) {
    show_wait(peer_rank, Phase::kRows, epoch_);
    check_closed();
    group::check_gone(group_, where, [&](int gone_rank) {
      return is_missing(gone_rank) ? gone.has_ended(group_, gone_rank, now_ns)
                                   : gone.keeps_others(group_, gone_rank, now_ns);
    });
    arrival.check(now_ns, is_missing);
  });
  end_wait(arrival.start_ns(), peer_rank);
}

void Exchange::await_flag(int peer_rank, Phase phase, uint64_t epoch, const uint64_t& flag) {
  const auto ready = [&] {
    if (relay_ != nullptr)
      relay_->pump();
    return sync::load_acquire(flag) >= epoch;
  };
  if (ready()) [[likely]]
    return;
  const auto& peer_activity = endpoint_.workspace(watched_rank(peer_rank)).activity();
  uint64_t seen_progress = sync::load_relaxed(peer_activity.progress);
  const auto has_moved = [&] {
    const uint64_t progress = sync::load_relaxed(peer_activity.progress);
    return std::exchange(seen_progress, progress) != progress;
  };
  // Memory that is being faulted in shows no progress, and takes its time.
  const auto limit_ns = [&] {
    const bool is_growing =
        sync::load_relaxed(peer_activity.phase) == static_cast<int32_t>(Phase::kGrowing);
    return is_growing ? group_.arrival_timeout_ns() : group_.stall_timeout_ns();
  };
  const auto is_missing = [&](int rank_idx) {
    return phase == Phase::kOffers ? rank_idx == peer_rank : !is_done(rank_idx, epoch);
  };
  await_part(
      peer_rank, phase, site(phase), epoch, ladder_for(is_missing), ready, has_moved, limit_ns);
}

void Exchange::await_rail(int peer_rank, const std::function<bool()>& is_ready) {
  if (is_ready())
    return;
  // Messages of the rail are no flags, and a rank of another node shows no progress here.
  await_part(
      peer_rank,
      Phase::kIdle,
      site(Phase::kData),
      epoch_,
      group::wait_ladder(group_.has_spare_cores()),
      is_ready,
      [] { return false; },
      [this] { return group_.stall_timeout_ns(); });
}

template <typename Ready, typename HasMoved, typename Limit>
void Exchange::await_part(int peer_rank,
                          Phase shown_phase,
                          const group::WaitSite& where,
                          uint64_t epoch,
                          const group::WaitLadder& ladder,
                          const Ready& ready,
                          const HasMoved& has_moved,
                          const Limit& limit_ns) {
  const int64_t start_ns = sync::now_ns();
  int64_t moved_ns = start_ns;
  group::GoneWatch gone;
  group::await_peer(group_, ladder, where, ready, [&](int64_t now_ns) {
    show_wait(peer_rank, shown_phase, epoch);
    if (has_moved()) {
      moved_ns = now_ns;
      gone.restart();
    }
    group::check_gone(group_, where, [&](int gone_rank) {
      return !is_done(gone_rank, epoch) && gone.has_ended(group_, gone_rank, now_ns);
    });
    if (const int64_t limit = limit_ns(); now_ns - moved_ns > limit)
      give_up_stalled(peer_rank, where, limit);
  });
  end_wait(start_ns, peer_rank);
}

bool Exchange::is_done(int peer_rank, uint64_t epoch) const {
  return sync::load_acquire(endpoint_.own_workspace().done(epoch, peer_rank).epoch) >= epoch;
}

void Exchange::give_up_rail(int peer_rank, const std::string& text) {
  constexpr int64_t kLookNs = 1'000'000;
  const int64_t end_ns =
      sync::now_ns() + std::min(group::kRemoteGraceNs, group_.stall_timeout_ns());
  const group::WaitSite where = site(step_);
  do {
    group::look_up(
        group_,
        where,
        [] { return false; },
        [&](int64_t) {
          group::check_gone(
              group_, where, [&](int gone_rank) { return !is_done(gone_rank, epoch_); });
        });
    sync::sleep_ns(kLookNs);
  } while (sync::now_ns() < end_ns);
  abort_rail(peer_rank, text);
}

void Exchange::abort_rail(int peer_rank, const std::string& text) {
  group_.abort(layout::AbortCause::kPeerFailed,
               site(step_),
               {peer_rank},
               concat("the rail between rank ",
                      group_.rank_idx(),
                      " and rank ",
                      peer_rank,
                      " failed in ",
                      layout::operation_name(operation_),
                      " of buffer ",
                      endpoint_.buffer_number(),
                      ", epoch ",
                      epoch_,
                      ": ",
                      text));
  group_.throw_abort();
}

void Exchange::show_wait(int peer_rank, Phase phase, uint64_t flag_epoch) {
  auto& activity = endpoint_.own_workspace().activity();
  sync::store_relaxed(activity.waiting_epoch, flag_epoch);
  sync::store_relaxed(activity.waiting_phase, static_cast<int32_t>(phase));
  sync::store_relaxed(activity.waiting_for, static_cast<uint32_t>(peer_rank + 1));
}

void Exchange::give_up_stalled(int peer_rank, const group::WaitSite& where, int64_t limit_ns) {
  const int first = watched_rank(peer_rank);
  const int culprit =
      group::find_culprit(group_, where, first == group_.rank_idx() ? peer_rank : first);
  group::give_up_stalled(group_, where, culprit, limit_ns, concat("rank ", peer_rank));
}

void Exchange::end_wait(int64_t start_ns, int peer_rank) {
  sync::store_relaxed(endpoint_.own_workspace().activity().waiting_for, uint32_t{0});
  const int64_t now_ns = sync::now_ns();
  waited_ns_.resize(static_cast<size_t>(group_.num_ranks()));
  waited_ns_[static_cast<size_t>(peer_rank)] += now_ns - start_ns;
  endpoint_.add_wait(peer_rank, now_ns - start_ns);
  if (!endpoint_.tracer().is_enabled())
    return;
  // Records of one operation do not overlap: own work ends where a wait starts.
  record(phase_start_ns_, start_ns, -1);
  record(start_ns, now_ns, peer_rank);
  phase_start_ns_ = now_ns;
}

void reject_operation(Endpoint& endpoint,
                      layout::Operation operation,
                      RowStatus status,
                      const std::string& message,
                      const group::InterruptCheck& interrupt_check) {
  run_rejected<Exchange>(endpoint, operation, status, message, interrupt_check);
}

}  // namespace moe::ops
