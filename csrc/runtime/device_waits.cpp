#include "core/sync.h"
#include "group/peer_wait.h"
#include "runtime/device_exchange.h"
#include "runtime/polling.h"

// Waits of the host for kernels: it polls what they write, and sees to it that they do not wait in
// vain for a peer that has died, left or never comes.

namespace moe::runtime {

namespace {

using kernels::Cause;
using kernels::OperationStatus;
using layout::Phase;

constexpr int kLooksPerQuery = 256;
constexpr int64_t kLookEveryNs = 2'000'000;

}  // namespace

void DeviceExchange::await(Phase phase, const std::function<bool()>& is_ready) {
  if (is_ready())
    return;
  endpoint_.operations().count_host_wait();
  const int64_t start_ns = sync::now_ns();
  int64_t looked_ns = start_ns;
  int64_t now_ns = start_ns;
  gone_ = {};
  const group::WaitSite where = site(phase);
  for (Polling polling; !is_ready();) {
    polling.rest(now_ns - start_ns);
    now_ns = sync::now_ns();
    if (now_ns - looked_ns < kLookEveryNs)
      continue;
    looked_ns = now_ns;
    group::look_up(group_, where, is_ready, [&](int64_t) { look_around(phase, now_ns); });
  }
  arrivals_.reset();
}

void DeviceExchange::await_ticket(Phase phase, uint64_t ticket) {
  // A kernel that fails in itself never gives its ticket. Asking the device costs more than a look
  // at the ticket, which comes soon as a rule.
  std::shared_ptr<Event> event;
  int num_looks = 0;
  await(phase, [&] {
    if (mailbox_->has_ticket(ticket))
      return true;
    if (++num_looks % kLooksPerQuery != 0)
      return false;
    if (event == nullptr && endpoint_.is_capturing())
      return false;  // asking about events may have no place in a capture of the caller's
    if (event == nullptr)
      event = endpoint_.order().stream()->record();
    return event->is_complete();
  });
  if (!mailbox_->has_ticket(ticket))
    throw std::logic_error(concat("the kernels of epoch ", epoch_, " ended without an answer"));
  if (mailbox_->status() != OperationStatus::kLeft)
    return;
  check_left();
  group_.check_abort();
  throw std::logic_error(concat("the kernels of epoch ", epoch_, " left without a cause"));
}

/// Operations behind it may wait for the same peer, each for a row of its own.
void DeviceExchange::await_end_of_exchange() const {
  const int64_t start_ns = sync::now_ns();
  for (Polling polling; !mailbox_->has_ticket(ticket_) && !endpoint_.order().stream()->is_idle();)
    polling.rest(sync::now_ns() - start_ns);
}

void DeviceExchange::look_around(Phase phase, int64_t now_ns) {
  check_left();
  if (!knows_epoch())
    return;
  if (phase == Phase::kRows)
    check_closed();
  check_peers(phase, now_ns);
  if (phase == Phase::kRows)
    arrivals_.check(group_, endpoint_.control(), site(Phase::kRows), now_ns);
}

void DeviceExchange::check_closed() {
  BufferOperation::check_closed([this](int peer_rank) { return endpoint_.closed_epoch(peer_rank); },
                                [this](int peer_rank) {
                                  if (!has_launched_)
                                    return;
                                  stand_in_for(peer_rank);
                                  await_end_of_exchange();
                                });
}

/// The kernel that waits for the row of a peer that closed its buffer is given one that rejects.
void DeviceExchange::stand_in_for(int closed_rank) {
  for (int peer_rank = 0; peer_rank < group_.num_ranks(); ++peer_rank)
    if (group_.is_active(peer_rank) &&
        (peer_rank == closed_rank || !endpoint_.control().has_row(epoch_, peer_rank)))
      endpoint_.control().write_rejected_row(epoch_, peer_rank);
}

void DeviceExchange::check_peers(Phase phase, int64_t now_ns) {
  const group::WaitSite where = site(phase);
  const ControlMemory& control = endpoint_.control();
  group::check_gone(group_, where, [&](int gone_rank) {
    if (phase != Phase::kRows)
      return !control.is_done(epoch_, gone_rank) && gone_.has_ended(group_, gone_rank, now_ns);
    return control.has_row(epoch_, gone_rank) ? gone_.keeps_others(group_, gone_rank, now_ns)
                                              : gone_.has_ended(group_, gone_rank, now_ns);
  });
}

void DeviceExchange::check_left() {
  const kernels::WaitReport& report = endpoint_.control().report();
  const auto cause = static_cast<Cause>(sync::load_acquire(report.cause));
  if (cause == Cause::kNone)
    return;
  group_.check_abort();
  if (cause == Cause::kTimedOut)
    give_up_timed_out(group_, endpoint_.buffer_number(), report);
}

}  // namespace moe::runtime
