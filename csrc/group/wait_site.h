#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/error.h"
#include "layout/row.h"

namespace moe::group {

/// Lets a blocked operation answer its caller's signals; may throw. Empty on progress threads.
using InterruptCheck = std::function<void()>;

/// Place of a rank that waits, as an error names it.
struct WaitSite {
  layout::Operation operation = layout::Operation::kNone;
  layout::Phase phase = layout::Phase::kIdle;
  int64_t epoch = -1;          ///< epoch of the buffer, or the number of the call
  uint64_t buffer_number = 0;  ///< number of the buffer, or what stands for one in EntryTable
  const InterruptCheck* interrupt_check = nullptr;
  /// Name of the call, if it is no operation.
  const char* call = "a collective call of the communicator";

  /// "dispatch of buffer 3, epoch 7"
  std::string name() const {
    if (operation == layout::Operation::kNone)
      return call;
    return concat(
        layout::operation_name(operation), " of buffer ", buffer_number, ", epoch ", epoch);
  }
  /// "dispatch of buffer 3, epoch 7, phase data"
  std::string describe() const {
    return operation == layout::Operation::kNone
               ? name()
               : concat(name(), ", phase ", layout::phase_name(phase));
  }
  /// "enter dispatch of buffer 3, epoch 7": what a rank does that comes here.
  std::string entrance() const {
    return concat(operation == layout::Operation::kNone ? "arrive at " : "enter ", name());
  }
};

}  // namespace moe::group
