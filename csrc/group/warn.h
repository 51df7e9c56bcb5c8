#pragma once

#include <cstdint>
#include <string>

namespace moe::group {

/// Where warnings go, such as a peer that has not arrived for a minute; set once, by the bindings.
/// May be called on any thread.
using WarningSink = void (*)(const std::string& message);

void set_warning_sink(WarningSink sink);
void warn(const std::string& message);

/// How long a rank waits for another before it says so, and says so again: a minute, unless a test
/// is in a hurry.
int64_t warning_interval_ns();
void set_warning_interval_ns(int64_t interval_ns);

}  // namespace moe::group
