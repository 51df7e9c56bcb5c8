#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "group/group.h"
#include "layout/row.h"

namespace moe::runtime {

/// Operations of one buffer whose rows the host had not heard when their calls returned, in their
/// order. One thread issues operations, and it alone takes any out; the rest is thread-safe.
/// @tparam Verdict  DeferredAgreement, which knows the endpoint that has the ring
template <typename Verdict>
class VerdictRing {
 public:
  void push(std::shared_ptr<Verdict> verdict);
  /// Null for none.
  std::shared_ptr<Verdict> newest() const;
  bool is_empty() const;

  /// Takes out what has come; waits for operations of up to @p last_number, and for all others
  /// where one was found wrong.
  /// @return the first error that nobody has been told, or null. It tells of all of them.
  std::exception_ptr take_heard(uint64_t last_number, const group::InterruptCheck& interrupt_check);
  /// The same, waiting for all.
  std::exception_ptr take_all(const group::InterruptCheck& interrupt_check);

  /// Waits for the first that has not been heard, and leaves it here.
  /// @return whether there was one.
  bool await_next(const group::InterruptCheck& interrupt_check) const;
  /// Epoch up to which verdicts were taken out; see layout::Row.
  uint64_t heard_epoch() const;

  // Without waiting for anybody.
  /// Hears what has come.
  void hear() const;
  /// See DeferredAgreement::look(): of the operation that the others are behind.
  void look(int64_t now_ns) const;
  /// Returns whether all have come.
  bool is_complete() const;

 private:
  std::vector<std::shared_ptr<Verdict>> all() const;
  std::shared_ptr<Verdict> oldest() const;

  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<Verdict>> verdicts_;
};

template <typename Verdict>
void VerdictRing<Verdict>::push(std::shared_ptr<Verdict> verdict) {
  const std::lock_guard<std::mutex> lock(mutex_);
  verdicts_.push_back(std::move(verdict));
}

template <typename Verdict>
std::vector<std::shared_ptr<Verdict>> VerdictRing<Verdict>::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {verdicts_.begin(), verdicts_.end()};
}

template <typename Verdict>
std::shared_ptr<Verdict> VerdictRing<Verdict>::oldest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return verdicts_.empty() ? nullptr : verdicts_.front();
}

template <typename Verdict>
std::shared_ptr<Verdict> VerdictRing<Verdict>::newest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return verdicts_.empty() ? nullptr : verdicts_.back();
}

template <typename Verdict>
bool VerdictRing<Verdict>::is_empty() const {
  return oldest() == nullptr;
}

template <typename Verdict>
std::exception_ptr VerdictRing<Verdict>::take_heard(uint64_t last_number,
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
template <typename Verdict>
std::exception_ptr VerdictRing<Verdict>::take_all(const group::InterruptCheck& interrupt_check) {
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

template <typename Verdict>
bool VerdictRing<Verdict>::await_next(const group::InterruptCheck& interrupt_check) const {
  for (const auto& verdict : all())
    if (!verdict->has_ended()) {
      verdict->await_judged(interrupt_check);
      return true;
    }
  return false;
}

template <typename Verdict>
uint64_t VerdictRing<Verdict>::heard_epoch() const {
  const auto verdict = oldest();
  return verdict == nullptr ? layout::Row::kHeardAll : verdict->first_epoch() - 1;
}

template <typename Verdict>
void VerdictRing<Verdict>::hear() const {
  const auto verdicts = all();
  static_cast<void>(
      std::ranges::all_of(verdicts, [](const auto& verdict) { return verdict->hear_if_there(); }));
}

template <typename Verdict>
void VerdictRing<Verdict>::look(int64_t now_ns) const {
  const auto verdicts = all();
  const auto next = std::ranges::find_if_not(
      verdicts, [](const auto& verdict) { return verdict->is_complete(); });
  if (next != verdicts.end())
    (*next)->look(now_ns);
}

template <typename Verdict>
bool VerdictRing<Verdict>::is_complete() const {
  return std::ranges::all_of(all(), [](const auto& verdict) { return verdict->is_complete(); });
}

}  // namespace moe::runtime
