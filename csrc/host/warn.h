#pragma once

#include <string>

namespace moe::host {

/// Where warnings go, such as a peer that has not arrived for a minute; set once, by the bindings.
/// May be called on any thread.
using WarningSink = void (*)(const std::string& message);

void set_warning_sink(WarningSink sink);
void warn(const std::string& message);

}  // namespace moe::host
