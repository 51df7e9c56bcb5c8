#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "layout/row.h"

namespace moe::group {

/// One stretch of time of one operation; times are CLOCK_MONOTONIC.
struct TraceRecord {
  int64_t epoch;
  layout::Operation operation;
  const char* phase;  ///< "prepare", "rows", "offers", "data" or "wait"
  int64_t start_ns;
  int64_t end_ns;
  int peer_rank;  ///< rank waited for, -1 for own work
};

/// The last records of a buffer; recording is off until it is asked for.
class Tracer {
 public:
  static constexpr size_t kMaxRecords = 1 << 16;

  void enable() { is_enabled_ = true; }
  bool is_enabled() const { return is_enabled_; }

  void add(const TraceRecord& record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (records_.size() < kMaxRecords)
      records_.push_back(record);
    else
      records_[next_++ % kMaxRecords] = record;
  }

  /// Takes all records, oldest first.
  std::vector<TraceRecord> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<TraceRecord> taken;
    taken.reserve(records_.size());
    for (size_t i = 0; i < records_.size(); ++i)
      taken.push_back(records_[(next_ + i) % records_.size()]);
    records_.clear();
    next_ = 0;
    return taken;
  }

 private:
  bool is_enabled_ = false;
  std::mutex mutex_;
  std::vector<TraceRecord> records_;
  size_t next_ = 0;
};

}  // namespace moe::group
