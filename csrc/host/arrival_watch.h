#pragma once

#include <cstdint>

#include "host/group.h"

namespace moe::host {

/// How long this rank has waited for a peer to enter an operation.
class ArrivalWatch {
 public:
  /// @param site  The operation and its epoch; outlives this.
  ArrivalWatch(Group& group, const WaitSite& site, uint64_t buffer_number, int peer_rank);

  /// Called now and then while the peer has not come: warns once an interval, by name, and aborts
  /// and throws when the arrival limit has run out.
  void check();

  int64_t start_ns() const { return start_ns_; }

 private:
  Group& group_;
  const WaitSite& site_;
  uint64_t buffer_number_;
  int peer_rank_;
  int64_t start_ns_;
  int64_t warned_ns_;
};

}  // namespace moe::host
