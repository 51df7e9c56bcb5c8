#include "group/warn.h"

#include <atomic>

namespace moe::group {

namespace {
std::atomic<WarningSink> warning_sink{nullptr};
std::atomic<int64_t> interval_ns{60'000'000'000};
}  // namespace

void set_warning_sink(WarningSink sink) {
  warning_sink.store(sink);
}

void warn(const std::string& message) {
  if (const WarningSink sink = warning_sink.load())
    sink(message);
}

int64_t warning_interval_ns() {
  return interval_ns.load(std::memory_order_relaxed);
}

void set_warning_interval_ns(int64_t value_ns) {
  interval_ns.store(value_ns, std::memory_order_relaxed);
}

}  // namespace moe::group
