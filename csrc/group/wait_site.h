#pragma once

#include <cstdint>
#include <functional>

#include "layout/row.h"

namespace moe::group {

/// Lets a blocked operation answer its caller's signals; may throw. Empty on progress threads.
using InterruptCheck = std::function<void()>;

/// Where a rank is while it waits: what an error about it says.
struct WaitSite {
  layout::Operation operation = layout::Operation::kNone;
  layout::Phase phase = layout::Phase::kIdle;
  int64_t epoch = -1;          ///< of the buffer, or the number of the call
  uint64_t buffer_number = 0;  ///< or what stands for one in EntryTable
  const InterruptCheck* interrupt_check = nullptr;
  const char* call = "a collective call of the communicator";  ///< where it is no operation
};

}  // namespace moe::group
