#include "host/warn.h"

#include <atomic>

namespace moe::host {

namespace {
std::atomic<WarningSink> warning_sink{nullptr};
}

void set_warning_sink(WarningSink sink) {
  warning_sink.store(sink);
}

void warn(const std::string& message) {
  if (const WarningSink sink = warning_sink.load())
    sink(message);
}

}  // namespace moe::host
