#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "group/group.h"

namespace moe::runtime {

class LateVerdict;

/// Operations of one buffer whose rows the host had not heard when their calls returned, in their
/// order. One thread issues operations, and it alone takes any out; the rest is thread-safe.
class VerdictRing {
 public:
  void push(std::shared_ptr<LateVerdict> verdict);
  /// Null for none.
  std::shared_ptr<LateVerdict> newest() const;
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
  /// Of what was taken out; see layout::Row.
  uint64_t heard_epoch() const;

  // Without waiting for anybody.
  /// Hears what has come.
  void hear() const;
  /// See LateVerdict::look(): of the operation that the others are behind.
  void look(int64_t now_ns) const;
  /// Whether all have come.
  bool is_complete() const;

 private:
  std::vector<std::shared_ptr<LateVerdict>> all() const;
  std::shared_ptr<LateVerdict> oldest() const;

  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<LateVerdict>> verdicts_;
};

}  // namespace moe::runtime
