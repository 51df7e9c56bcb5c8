#include "runtime/operation_ring.h"

#include <algorithm>
#include <utility>

#include "layout/row.h"
#include "ops/operations_in_flight.h"

namespace moe::runtime {

using Verdicts = std::vector<std::shared_ptr<DeferredAgreement>>;

OperationRing::OperationRing(Device& device, int num_ranks, int num_experts) {
  for (uint64_t i = 0; i < (device.has_host_caller() ? 1 : ops::kMostUnheard); ++i)
    mailboxes_.emplace_back(device, num_ranks, num_experts);
}

Mailbox& OperationRing::take_mailbox(uint64_t number) {
  Mailbox& mailbox = mailboxes_[number % mailboxes_.size()];
  mailbox.reset();
  return mailbox;
}

void OperationRing::push(std::shared_ptr<DeferredAgreement> verdict) {
  const std::lock_guard<std::mutex> lock(mutex_);
  verdicts_.push_back(std::move(verdict));
}

Verdicts OperationRing::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {verdicts_.begin(), verdicts_.end()};
}

std::shared_ptr<DeferredAgreement> OperationRing::oldest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return verdicts_.empty() ? nullptr : verdicts_.front();
}

std::shared_ptr<DeferredAgreement> OperationRing::newest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return verdicts_.empty() ? nullptr : verdicts_.back();
}

std::exception_ptr OperationRing::take_heard(uint64_t number,
                                             bool runs_ahead,
                                             const group::InterruptCheck& interrupt_check) {
  const uint64_t num_in_flight = runs_ahead ? mailboxes_.size() : 1;
  const uint64_t last_number = number - std::min(number, num_in_flight);
  while (const auto verdict = oldest()) {
    if (verdict->number() <= last_number)
      verdict->await_judged(interrupt_check);
    else if (!verdict->hear_if_there())
      break;
    if (verdict->has_untold_error())
      return take_all(interrupt_check);
    const std::lock_guard<std::mutex> lock(mutex_);
    verdicts_.pop_front();
  }
  return nullptr;
}

/// An interrupt leaves all of them here. An abort is one error, whichever operations it has ended.
std::exception_ptr OperationRing::take_all(const group::InterruptCheck& interrupt_check) {
  for (const auto& verdict : all())
    verdict->await_judged(interrupt_check);
  const Verdicts verdicts = all();
  const bool has_told_abort =
      std::ranges::any_of(verdicts, [](const auto& verdict) { return verdict->has_told_abort(); });
  std::exception_ptr first;
  for (const auto& verdict : verdicts) {
    const std::exception_ptr error = verdict->take_untold_error();
    if (first == nullptr && !(has_told_abort && verdict->is_abort()))
      first = error;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  verdicts_.clear();
  return first;
}

bool OperationRing::await_next(const group::InterruptCheck& interrupt_check) const {
  for (const auto& verdict : all())
    if (!verdict->has_ended()) {
      verdict->await_judged(interrupt_check);
      return true;
    }
  return false;
}

uint64_t OperationRing::heard_epoch() const {
  const auto verdict = oldest();
  return verdict == nullptr ? layout::Row::kHeardAll : verdict->first_epoch() - 1;
}

void OperationRing::hear() const {
  const Verdicts verdicts = all();
  static_cast<void>(
      std::ranges::all_of(verdicts, [](const auto& verdict) { return verdict->hear_if_there(); }));
}

void OperationRing::look(int64_t now_ns) const {
  const Verdicts verdicts = all();
  const auto next = std::ranges::find_if_not(
      verdicts, [](const auto& verdict) { return verdict->is_complete(); });
  if (next != verdicts.end())
    (*next)->look(now_ns);
}

bool OperationRing::is_complete() const {
  return std::ranges::all_of(all(), [](const auto& verdict) { return verdict->is_complete(); });
}

}  // namespace moe::runtime
