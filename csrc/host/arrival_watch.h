#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "host/circle_watch.h"
#include "host/group.h"

namespace moe::host {

/// "rank 0 has waited 60 s for rank 1 to enter dispatch of buffer 3, epoch 7; it is in ..."
std::string describe_absence(const Group& group,
                             const WaitSite& site,
                             uint64_t buffer_number,
                             int peer_rank,
                             int64_t waited_ns);

/// Aborts and throws because @p peer_rank did not come within the arrival limit.
[[noreturn]] void give_up_absent(Group& group,
                                 const WaitSite& site,
                                 uint64_t buffer_number,
                                 int peer_rank);

/// Aborts and throws because @p culprit made no progress within the stall limit, which this rank
/// noticed as it waited for @p peer_rank.
[[noreturn]] void give_up_stalled(
    Group& group, const WaitSite& site, uint64_t buffer_number, int culprit, int peer_rank);

/// How long this rank has waited for a peer to enter an operation.
class ArrivalWatch {
 public:
  /// @param site  The operation and its epoch; outlives this.
  ArrivalWatch(Group& group, const WaitSite& site, uint64_t buffer_number, int peer_rank);

  /// Called now and then while the peer has not come: warns once an interval, by name; aborts and
  /// throws when the arrival limit has run out, or at once where the peer cannot come.
  /// @param is_missing  Whether a rank has not entered the operation.
  void check(const std::function<bool(int)>& is_missing);

  int64_t start_ns() const { return start_ns_; }

 private:
  Group& group_;
  const WaitSite& site_;
  uint64_t buffer_number_;
  int peer_rank_;
  int64_t start_ns_;
  int64_t warned_ns_;
  CircleWatch circle_;
};

}  // namespace moe::host
