#pragma once

#include <cstdint>
#include <optional>

#include "group/peer_wait.h"
#include "kernels/buffer.h"
#include "runtime/control_memory.h"

namespace moe::runtime {

/// Warns of a peer whose row does not come, and gives up where it cannot. The limit is the
/// kernel's.
class RowArrivals {
 public:
  /// @param site  The exchange, of a known epoch.
  void check(group::Group& group,
             const ControlMemory& control,
             const group::WaitSite& site,
             int64_t now_ns);
  void reset() { watch_.reset(); }

 private:
  group::WaitSite site_;
  std::optional<group::ArrivalWatch> watch_;  ///< watch of the first rank that has not come
};

/// Aborts and throws because a kernel that waited for a peer ran into the limit.
[[noreturn]] void give_up_timed_out(group::Group& group,
                                    uint64_t buffer_number,
                                    const kernels::WaitReport& report);

}  // namespace moe::runtime
