#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "group/group.h"

namespace moe::runtime {

/// Memory for kernels on other nodes to put into: what an engine such as NVSHMEM hands out, which
/// asks every rank for the same bytes at the same time. So it does not grow in the middle of an
/// operation, as a heap may; a buffer takes what it needs when it is made.
class SymmetricRegions {
 public:
  virtual ~SymmetricRegions() = default;

  /// A region of this rank's, zeroed on every rank, aligned to 4096 bytes. A kernel names a place
  /// in a peer's by the address of that place here, and rank i of the group by the number i.
  /// Collective over the whole group: every rank asks for the same bytes.
  ///
  /// The region is given back when its last owner is gone, which every rank sees to by itself; it
  /// is handed out again once every rank has given its own back.
  /// @throws InvalidArgument  not every rank of the group is there, or sizes differ.
  /// @throws CapacityError    on every rank where one has no more memory.
  virtual std::shared_ptr<std::byte> allocate(group::Group& group,
                                              int64_t bytes,
                                              const group::InterruptCheck& interrupt_check) = 0;
};

}  // namespace moe::runtime
