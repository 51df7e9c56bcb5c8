#pragma once

#include <cstdint>
#include <string>

namespace moe::group {

/// Receiver of warnings, such as a peer that is a minute late; set once, by the bindings.
/// May be called on any thread.
using WarningSink = void (*)(const std::string& message);

void set_warning_sink(WarningSink sink);
void warn(const std::string& message);

/// Seconds that a rank waits for another before it says so, and says so again: 60, unless a test
/// is in a hurry.
int64_t warning_interval_ns();
void set_warning_interval_ns(int64_t interval_ns);

}  // namespace moe::group
