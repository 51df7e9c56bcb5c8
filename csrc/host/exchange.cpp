#include "host/exchange.h"

#include <algorithm>
#include <cstring>

#include "host/wait.h"
#include "host/warn.h"

namespace moe::host {

namespace {

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

/// See DispatchParams::quantization_code.
std::string quantization_text(int32_t code) {
  constexpr const char* kFormats[] = {"pairs", "FP8_BLOCK128", "MXFP8"};
  constexpr const char* kScales[] = {"FLOAT32", "FLOAT32_POWER_OF_2", "UE8M0"};
  const int32_t format = (code >> 4) & 15;
  const int32_t scale_format = (code >> 8) & 15;
  if (format > 2 || scale_format > 2)
    return concat("format ", code);
  std::string text = kFormats[format];
  if (format > 0)
    text += concat("(", kScales[scale_format], ")");
  return (code & 2) != 0 ? text + " column-major" : text;
}

}  // namespace

std::string describe(const layout::OperationArguments& arguments) {
  const auto operation = static_cast<layout::Operation>(arguments.operation);
  std::string text = layout::operation_name(operation);
  text += concat("(",
                 layout::layout_name(static_cast<layout::RowLayout>(arguments.layout)),
                 ", expert_alignment=",
                 arguments.expert_alignment);
  if (arguments.row_bytes > 0)
    text += concat(", ", dtype_text(arguments.dtype), " rows of ", arguments.row_bytes, " bytes");
  if (arguments.quantization != 0)
    text += concat(", quantized as ", quantization_text(arguments.quantization));
  if (arguments.num_scales > 0)
    text += concat(", ", arguments.num_scales, " scales of ", arguments.scale_bytes, " bytes");
  if (arguments.weight_bytes > 0)
    text += concat(", float", arguments.weight_bytes * 8, " weights");
  else
    text += ", no weights";
  constexpr const char* kOnOverflow[] = {"grow", "drop", "raise"};
  if (arguments.on_overflow > 0 && arguments.on_overflow < 3)
    text += concat(", on_overflow=", kOnOverflow[arguments.on_overflow]);
  if (arguments.expert_capacity >= 0)
    text += concat(", num_rows_per_expert=", arguments.expert_capacity);
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
  group_.show_presence(endpoint_.buffer_number(), epoch_, operation_);
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
    await_flag(peer_rank, Phase::kReuse, former_epoch, done.epoch);
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
    if (message.status != RowStatus::kOk) {
      std::strncpy(row.message(), message.message.c_str(), Row::kMessageBytes - 1);
      row.message()[Row::kMessageBytes - 1] = '\0';
    } else if (message.counts != nullptr) {
      std::copy_n(message.counts,
                  Row::num_counts(group_.num_ranks(), endpoint_.config().num_experts),
                  row.counts());
    }
    sync::store_release(row.epoch, epoch_);
    sync::ring(group_.doorbell(peer_rank));
  }
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
  await_flag(peer_rank, Phase::kOffers, epoch_, second.epoch);
  step_ = Phase::kData;
  return second;
}

void Exchange::settle() {
  release_done();
  endpoint_.complete_epoch(epoch_);
  group_.leave_presence();
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
  await_flag(
      peer_rank, Phase::kData, epoch_, endpoint_.own_workspace().done(epoch_, peer_rank).epoch);
}

void Exchange::complete() {
  if (state_ != State::kEntered)
    return;
  enter(nullptr);
  state_ = State::kEnded;
  group_.leave_presence();
  endpoint_.complete_epoch(epoch_);
}

void Exchange::fail(const std::string& reason) {
  if (state_ != State::kEntered)
    return;
  state_ = State::kEnded;
  group_.leave_presence();
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
