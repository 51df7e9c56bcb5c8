#include "runtime/verdict_ring.h"

#include <algorithm>
#include <utility>

#include "layout/row.h"
#include "runtime/late_verdict.h"

namespace moe::runtime {

void VerdictRing::push(std::shared_ptr<LateVerdict> verdict) {
  const std::lock_guard<std::mutex> lock(mutex_);
  verdicts_.push_back(std::move(verdict));
}

std::vector<std::shared_ptr<LateVerdict>> VerdictRing::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {verdicts_.begin(), verdicts_.end()};
}

std::shared_ptr<LateVerdict> VerdictRing::oldest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return verdicts_.empty() ? nullptr : verdicts_.front();
}

std::shared_ptr<LateVerdict> VerdictRing::newest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return verdicts_.empty() ? nullptr : verdicts_.back();
}

bool VerdictRing::is_empty() const {
  return oldest() == nullptr;
}

std::exception_ptr VerdictRing::take_heard(uint64_t last_number,
                                           const group::InterruptCheck& interrupt_check) {
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
std::exception_ptr VerdictRing::take_all(const group::InterruptCheck& interrupt_check) {
  for (const auto& verdict : all())
    verdict->await_judged(interrupt_check);
  const auto verdicts = all();
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

bool VerdictRing::await_next(const group::InterruptCheck& interrupt_check) const {
  for (const auto& verdict : all())
    if (!verdict->has_ended()) {
      verdict->await_judged(interrupt_check);
      return true;
    }
  return false;
}

uint64_t VerdictRing::heard_epoch() const {
  const auto verdict = oldest();
  return verdict == nullptr ? layout::Row::kHeardAll : verdict->first_epoch() - 1;
}

void VerdictRing::hear() const {
  const auto verdicts = all();
  static_cast<void>(
      std::ranges::all_of(verdicts, [](const auto& verdict) { return verdict->hear_if_there(); }));
}

void VerdictRing::look(int64_t now_ns) const {
  const auto verdicts = all();
  const auto next = std::ranges::find_if_not(
      verdicts, [](const auto& verdict) { return verdict->is_complete(); });
  if (next != verdicts.end())
    (*next)->look(now_ns);
}

bool VerdictRing::is_complete() const {
  return std::ranges::all_of(all(), [](const auto& verdict) { return verdict->is_complete(); });
}

}  // namespace moe::runtime
