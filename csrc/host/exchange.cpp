#include "host/exchange.h"

#include <algorithm>
#include <cstring>

#include "host/wait.h"
#include "host/warn.h"

namespace moe::host {

namespace {

// A peer may die after its part of an operation that the others can complete; who has not entered
// by then has seen the death as well and will not.
constexpr int64_t kDeathGraceNs = 300'000'000;

using layout::Phase;
using layout::Row;
using layout::RowStatus;

std::string dtype_text(int32_t dlpack_type) {
  constexpr const char* kFamilies[] = {
      "int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const int32_t code = dlpack_type >> 8;
  if (code < 0 || code > 6)
    return concat("opaque type ", dlpack_type);
  return kFamilies[code] + std::to_string(dlpack_type & 0xFF);
}

}  // namespace

std::string describe(const layout::OperationArguments& arguments) {
  const auto operation = static_cast<layout::Operation>(arguments.operation);
  std::string text = layout::operation_name(operation);
  text += arguments.layout == static_cast<int32_t>(layout::RowLayout::kRankMajor) ? "(RANK_MAJOR"
                                                                                  : "(EXPERT_MAJOR";
  text += concat(", expert_alignment=", arguments.expert_alignment);
  if (arguments.row_bytes > 0)
    text += concat(", ", dtype_text(arguments.dtype), " rows of ", arguments.row_bytes, " bytes");
  if (arguments.weight_bytes > 0)
    text += concat(", float", arguments.weight_bytes * 8, " weights");
  else
    text += ", no weights";
  if (arguments.plan_hash != 0)
    text += concat(", handle ", arguments.plan_hash % 1000000);
  return text + ")";
}

Exchange::Exchange(Endpoint& endpoint,
                   layout::Operation operation,
                   const InterruptCheck& interrupt_check)
    : endpoint_(endpoint),
      group_(endpoint.group()),
      operation_(operation),
      interrupt_check_(interrupt_check) {
  MOE_CHECK(!endpoint.is_destroyed(),
            layout::operation_name(operation),
            ": this buffer has been destroyed");
  group_.check_usable(operation);
  check_closed();
  if (endpoint_.tracer().is_enabled())
    phase_start_ns_ = sync::now_ns();
  auto& activity = endpoint_.own_workspace().activity();
  sync::store_relaxed(activity.waiting_for, uint32_t{0});
  sync::store_relaxed(activity.core, sync::current_core());
  epoch_ = endpoint_.take_epoch();
  show_presence(operation_);
}

void Exchange::show_presence(layout::Operation operation) {
  layout::Presence& presence = group_.presence(group_.rank_idx());
  sync::store_relaxed(presence.buffer_number, endpoint_.buffer_number());
  sync::store_relaxed(presence.epoch, epoch_);
  sync::store_relaxed(presence.operation, static_cast<int32_t>(operation));
}

std::string Exchange::whereabouts(int peer_rank) const {
  const layout::Presence& presence = group_.presence(peer_rank);
  const auto operation = static_cast<layout::Operation>(sync::load_relaxed(presence.operation));
  if (operation == layout::Operation::kNone)
    return "";
  return concat("; it is in ",
                layout::operation_name(operation),
                " of buffer ",
                sync::load_relaxed(presence.buffer_number),
                ", epoch ",
                sync::load_relaxed(presence.epoch));
}

void Exchange::check_closed() const {
  const auto& workspace = endpoint_.own_workspace();
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    if (peer_rank == group_.rank_idx() || !group_.is_active(peer_rank) ||
        sync::load_acquire(workspace.closed(peer_rank).epoch) == 0)
      continue;
    // It may have closed after an operation whose end this rank has not seen yet.
    if (epoch_ == 0 || sync::load_acquire(workspace.row(epoch_, peer_rank).epoch) < epoch_)
      throw InvalidArgument(concat("rank ",
                                   peer_rank,
                                   " has destroyed this buffer, rank ",
                                   group_.rank_idx(),
                                   " calls ",
                                   layout::operation_name(operation_),
                                   " on it"));
  }
}

WaitSite Exchange::site(Phase phase) const {
  return WaitSite{operation_, phase, static_cast<int64_t>(epoch_), &interrupt_check_};
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
    await_entered(peer_rank, Phase::kReuse, former_epoch, [&] {
      return sync::load_acquire(done.epoch) >= former_epoch;
    });
  }
}

void Exchange::publish(const RowMessage& message) {
  await_reuse();
  for (int offset = 0; offset < group_.num_ranks(); ++offset) {
    // Each rank starts behind itself, so that no reader gets all rows at the end.
    const int peer_rank = (group_.rank_idx() + 1 + offset) % group_.num_ranks();
    if (!group_.is_active(peer_rank))
      continue;
    Row& row = endpoint_.workspace(peer_rank).row(epoch_, group_.rank_idx());
    row.status = static_cast<int32_t>(message.status);
    row.num_tokens = static_cast<int32_t>(message.num_tokens);
    row.arguments = message.arguments;
    row.offer = message.offer;
    row.weights_offer = message.weights_offer;
    row.needed_bytes = message.needed_bytes;
    row.available_bytes = message.available_bytes;
    row.reserved = 0;
    if (message.status != RowStatus::kOk) {
      std::strncpy(row.message(), message.message.c_str(), Row::kMessageBytes - 1);
      row.message()[Row::kMessageBytes - 1] = '\0';
    } else if (message.counts != nullptr) {
      std::copy_n(
          message.counts, endpoint_.config().num_experts + group_.num_ranks(), row.counts());
    }
    sync::store_release(row.epoch, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  }
}

WaitLadder Exchange::ladder_for(int peer_rank) const {
  const uint32_t peer_core = sync::load_relaxed(endpoint_.workspace(peer_rank).activity().core);
  return peer_core == sync::current_core() ? wait_ladder_on_core_of_peer(group_.has_spare_cores())
                                           : wait_ladder(group_.has_spare_cores());
}

void Exchange::await_row(int peer_rank) {
  const Row& row = endpoint_.own_workspace().row(epoch_, peer_rank);
  const auto ready = [&] { return sync::load_acquire(row.epoch) >= epoch_; };
  if (ready()) [[likely]]
    return;
  const int64_t start_ns = sync::now_ns();
  int64_t warned_ns = start_ns;
  int64_t death_ns = 0;
  auto& activity = endpoint_.own_workspace().activity();
  const WaitSite where = site(Phase::kRows);
  wait_until(group_, ladder_for(peer_rank), ready, [&] {
    show_wait(peer_rank, Phase::kRows, epoch_);
    if (interrupt_check_)
      interrupt_check_();
    if (ready())
      return;
    group_.check_abort();
    try {
      check_closed();
    } catch (...) {
      // No rank can get that row, so all end here alike; nothing was written to anybody.
      state_ = State::kEnded;
      show_presence(layout::Operation::kNone);
      throw;
    }
    const int64_t now_ns = sync::now_ns();
    group_.check_peers(where, [&](int gone_rank) {
      if (sync::load_acquire(endpoint_.own_workspace().row(epoch_, gone_rank).epoch) < epoch_)
        return true;
      if (group_.state(gone_rank) != PeerState::kDead)
        return false;
      if (death_ns == 0)
        death_ns = now_ns;
      return now_ns - death_ns > kDeathGraceNs;
    });
    if (now_ns - warned_ns > warning_interval_ns()) {
      warned_ns = now_ns;
      warn(concat("rank ",
                  group_.rank_idx(),
                  " has waited ",
                  (now_ns - start_ns) / 1'000'000'000,
                  " s for rank ",
                  peer_rank,
                  " to enter ",
                  layout::operation_name(operation_),
                  " of buffer ",
                  endpoint_.buffer_number(),
                  ", epoch ",
                  epoch_,
                  whereabouts(peer_rank)));
    }
    if (now_ns - start_ns > group_.arrival_timeout_ns()) {
      group_.abort(layout::AbortCause::kPeerTimeout,
                   where,
                   {peer_rank},
                   concat("rank ",
                          peer_rank,
                          " did not enter ",
                          layout::operation_name(operation_),
                          " of buffer ",
                          endpoint_.buffer_number(),
                          " (epoch ",
                          epoch_,
                          ") within ",
                          static_cast<double>(group_.arrival_timeout_ns()) / 1e9,
                          " s of rank ",
                          group_.rank_idx(),
                          whereabouts(peer_rank)));
      group_.throw_abort();
    }
  });
  sync::store_relaxed(activity.waiting_for, uint32_t{0});
  trace_wait(start_ns, peer_rank);
}

template <typename Ready>
void Exchange::await_entered(int peer_rank, Phase phase, uint64_t last_epoch, Ready&& ready) {
  if (ready()) [[likely]]
    return;
  const int64_t start_ns = sync::now_ns();
  auto& activity = endpoint_.own_workspace().activity();
  const auto& peer_activity = endpoint_.workspace(peer_rank).activity();
  const WaitSite where = site(phase);
  int64_t moved_ns = start_ns;
  uint64_t seen_progress = sync::load_relaxed(peer_activity.progress);
  wait_until(group_, ladder_for(peer_rank), ready, [&] {
    show_wait(peer_rank, phase, last_epoch);
    if (interrupt_check_)
      interrupt_check_();
    if (ready())
      return;
    group_.check_abort();
    group_.check_peers(where, [&](int gone_rank) {
      return sync::load_acquire(endpoint_.own_workspace().done(last_epoch, gone_rank).epoch) <
             last_epoch;
    });
    const int64_t now_ns = sync::now_ns();
    const uint64_t progress = sync::load_relaxed(peer_activity.progress);
    if (progress != seen_progress) {
      seen_progress = progress;
      moved_ns = now_ns;
    }
    // Memory that is being faulted in shows no progress, and takes its time.
    const bool is_growing =
        sync::load_relaxed(peer_activity.phase) == static_cast<int32_t>(Phase::kGrowing);
    if (now_ns - moved_ns > (is_growing ? group_.arrival_timeout_ns() : group_.stall_timeout_ns()))
      give_up_stalled(peer_rank, where);
  });
  sync::store_relaxed(activity.waiting_for, uint32_t{0});
  trace_wait(start_ns, peer_rank);
}

void Exchange::show_wait(int peer_rank, Phase phase, uint64_t flag_epoch) {
  auto& activity = endpoint_.own_workspace().activity();
  sync::store_relaxed(activity.waiting_epoch, flag_epoch);
  sync::store_relaxed(activity.waiting_phase, static_cast<int32_t>(phase));
  sync::store_relaxed(activity.waiting_for, static_cast<uint32_t>(peer_rank + 1));
}

int Exchange::awaited_by(int rank_idx) const {
  const auto& workspace = endpoint_.workspace(rank_idx);
  const auto& activity = workspace.activity();
  const auto peer_rank = static_cast<int>(sync::load_relaxed(activity.waiting_for)) - 1;
  if (peer_rank < 0 || peer_rank >= group_.num_ranks() || !group_.is_active(peer_rank))
    return -1;
  const uint64_t flag_epoch = sync::load_relaxed(activity.waiting_epoch);
  uint64_t seen_epoch = 0;
  switch (static_cast<Phase>(sync::load_relaxed(activity.waiting_phase))) {
    case Phase::kRows:
      seen_epoch = sync::load_relaxed(workspace.row(flag_epoch, peer_rank).epoch);
      break;
    case Phase::kOffers:
      seen_epoch = sync::load_relaxed(workspace.second_offer(flag_epoch, peer_rank).epoch);
      break;
    default:
      seen_epoch = sync::load_relaxed(workspace.done(flag_epoch, peer_rank).epoch);
  }
  return seen_epoch < flag_epoch ? peer_rank : -1;
}

void Exchange::give_up_stalled(int peer_rank, const WaitSite& where) {
  // A peer that itself waits for somebody is not the one to blame: follow the chain to its end.
  int culprit = peer_rank;
  for (int hops = 0; hops < group_.num_ranks(); ++hops) {
    const int next = awaited_by(culprit);
    if (next < 0 || next == group_.rank_idx())
      break;
    culprit = next;
  }
  group_.abort(layout::AbortCause::kPeerTimeout,
               where,
               {culprit},
               concat("rank ",
                      culprit,
                      " made no progress for ",
                      static_cast<double>(group_.stall_timeout_ns()) / 1e9,
                      " s in ",
                      layout::operation_name(operation_),
                      " of buffer ",
                      endpoint_.buffer_number(),
                      ", epoch ",
                      epoch_,
                      ", phase ",
                      layout::phase_name(where.phase),
                      "; rank ",
                      group_.rank_idx(),
                      " waited for rank ",
                      peer_rank));
  group_.throw_abort();
}

Rows Exchange::collect(bool with_counts) {
  const int num_ranks = group_.num_ranks();
  Rows rows;
  rows.headers.resize(static_cast<size_t>(num_ranks));
  for (int peer_rank = 0; peer_rank < num_ranks; ++peer_rank) {
    if (!group_.is_active(peer_rank))
      continue;
    await_row(peer_rank);
    rows.headers[static_cast<size_t>(peer_rank)] = endpoint_.own_workspace().row(epoch_, peer_rank);
  }
  check_agreement(rows);
  step_ = Phase::kData;
  if (with_counts) {
    rows.counts = layout::CountMatrix(num_ranks, endpoint_.config().num_experts);
    for (int peer_rank = 0; peer_rank < num_ranks; ++peer_rank)
      if (group_.is_active(peer_rank))
        std::copy_n(endpoint_.own_workspace().row(epoch_, peer_rank).counts(),
                    rows.counts.stride(),
                    rows.counts.row(peer_rank));
  }
  return rows;
}

void Exchange::check_agreement(const Rows& rows) {
  std::string message;
  auto worst = RowStatus::kOk;
  CapacityError capacity("", 0, 0);
  int first_rank = -1;
  int other_rank = -1;
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    if (!group_.is_active(peer_rank))
      continue;
    const Row& header = rows.headers[static_cast<size_t>(peer_rank)];
    const auto status = static_cast<RowStatus>(header.status);
    if (status != RowStatus::kOk) {
      // Mistakes come before shortages, the lowest rank's kind decides the exception's type.
      if (worst == RowStatus::kOk || (worst == RowStatus::kNoCapacity && status != worst))
        worst = status;
      message += concat(message.empty() ? "" : "; ",
                        "rank ",
                        peer_rank,
                        ": ",
                        endpoint_.own_workspace().row(epoch_, peer_rank).message());
      if (status == RowStatus::kNoCapacity) {
        capacity.ranks.push_back(peer_rank);
        capacity.needed_bytes = std::max(capacity.needed_bytes, header.needed_bytes);
        capacity.available_bytes = header.available_bytes;
      }
    }
    if (first_rank < 0)
      first_rank = peer_rank;
    else if (other_rank < 0 &&
             !(header.arguments == rows.headers[static_cast<size_t>(first_rank)].arguments))
      other_rank = peer_rank;
  }
  if (worst == RowStatus::kOk && other_rank >= 0) {
    worst = RowStatus::kInvalidArgument;
    message = concat("ranks disagree: ",
                     describe(rows.headers[static_cast<size_t>(first_rank)].arguments),
                     " on rank ",
                     first_rank,
                     " met ",
                     describe(rows.headers[static_cast<size_t>(other_rank)].arguments),
                     " on rank ",
                     other_rank);
  }
  if (worst == RowStatus::kOk)
    return;
  settle();
  if (worst == RowStatus::kInvalidType)
    throw InvalidType(message);
  if (worst == RowStatus::kNoCapacity) {
    CapacityError error(message, capacity.needed_bytes, capacity.available_bytes);
    error.ranks = capacity.ranks;
    throw error;
  }
  throw InvalidArgument(message);
}

void Exchange::reject(const layout::OperationArguments& arguments,
                      RowStatus status,
                      const std::string& message,
                      uint64_t needed_bytes,
                      uint64_t available_bytes) {
  RowMessage row;
  row.arguments = arguments;
  row.status = status;
  row.message = message;
  row.needed_bytes = needed_bytes;
  row.available_bytes = available_bytes;
  publish(row);
  collect(false);
  throw std::logic_error("a rejected row was not reported");
}

void Exchange::publish_second_offer(const Offer& offer,
                                    uint64_t needed_bytes,
                                    uint64_t available_bytes) {
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank) {
    if (!group_.is_active(peer_rank))
      continue;
    auto& second = endpoint_.workspace(peer_rank).second_offer(epoch_, group_.rank_idx());
    second.offer = offer;
    second.needed_bytes = needed_bytes;
    second.available_bytes = available_bytes;
    sync::store_release(second.epoch, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  }
}

const layout::SecondOffer& Exchange::await_second_offer(int peer_rank) {
  const auto& second = endpoint_.own_workspace().second_offer(epoch_, peer_rank);
  step_ = Phase::kOffers;
  await_entered(peer_rank, Phase::kOffers, epoch_, [&] {
    return sync::load_acquire(second.epoch) >= epoch_;
  });
  step_ = Phase::kData;
  return second;
}

void Exchange::settle() {
  release_done();
  endpoint_.complete_epoch(epoch_);
  show_presence(layout::Operation::kNone);
  state_ = State::kEnded;
}

void Exchange::release_done() {
  // What was read from a peer counts only if that peer had not given up by then: it may have
  // overwritten its rows since.
  std::atomic_thread_fence(std::memory_order_acquire);
  group_.check_abort();
  for (int offset = 0; offset < group_.num_ranks(); ++offset) {
    const int peer_rank = (group_.rank_idx() + 1 + offset) % group_.num_ranks();
    if (!group_.is_active(peer_rank))
      continue;
    auto& done = endpoint_.workspace(peer_rank).done(epoch_, group_.rank_idx());
    sync::store_release(done.epoch, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  }
}

void Exchange::await_done(int peer_rank) {
  const auto& done = endpoint_.own_workspace().done(epoch_, peer_rank);
  await_entered(
      peer_rank, Phase::kData, epoch_, [&] { return sync::load_acquire(done.epoch) >= epoch_; });
}

void Exchange::complete() {
  if (state_ != State::kEntered)
    return;
  enter(nullptr);
  state_ = State::kEnded;
  show_presence(layout::Operation::kNone);
  endpoint_.complete_epoch(epoch_);
}

void Exchange::fail(const std::string& reason) {
  if (state_ != State::kEntered)
    return;
  state_ = State::kEnded;
  show_presence(layout::Operation::kNone);
  if (!group_.is_aborted())
    group_.abort(layout::AbortCause::kPeerFailed,
                 site(step_),
                 {group_.rank_idx()},
                 concat("rank ",
                        group_.rank_idx(),
                        " gave up ",
                        layout::operation_name(operation_),
                        ", epoch ",
                        epoch_,
                        ": ",
                        reason));
  for (auto& window : offered_)
    group_.quarantine(std::move(window));
}

void Exchange::enter(const char* phase) {
  if (!endpoint_.tracer().is_enabled())
    return;
  const int64_t now_ns = sync::now_ns();
  record(phase_start_ns_, now_ns, -1);
  phase_ = phase;
  phase_start_ns_ = now_ns;
}

void Exchange::trace_wait(int64_t start_ns, int peer_rank) {
  if (!endpoint_.tracer().is_enabled())
    return;
  // Records of one operation do not overlap: own work ends where a wait starts.
  const int64_t now_ns = sync::now_ns();
  record(phase_start_ns_, start_ns, -1);
  record(start_ns, now_ns, peer_rank);
  phase_start_ns_ = now_ns;
}

void Exchange::record(int64_t start_ns, int64_t end_ns, int peer_rank) {
  if (phase_ != nullptr && end_ns > start_ns)
    endpoint_.tracer().add(
        {static_cast<int64_t>(epoch_), operation_, phase_, start_ns, end_ns, peer_rank});
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

}  // namespace moe::host
