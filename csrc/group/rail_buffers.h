#pragma once

#include <cstdint>
#include <memory>

#include "core/rail.h"

namespace moe::group {

/// Memory for messages between nodes, kept between operations up to a limit.
///
/// A buffer goes back when its last owner drops it, on whatever thread: one that an engine still
/// touches is never handed out again. Thread-safe.
class RailBuffers {
 public:
  /// @param most_kept_bytes  Most bytes of buffers that nobody uses; what is beyond goes back to
  ///   the system.
  explicit RailBuffers(uint64_t most_kept_bytes);

  /// Contents are undefined. Starts at a multiple of 64.
  Rail::Buffer take(uint64_t bytes);

  /// Bytes of buffers that nobody uses now.
  uint64_t kept_bytes() const;

 private:
  class Store;
  std::shared_ptr<Store> store_;
};

}  // namespace moe::group
