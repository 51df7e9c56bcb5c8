#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/replicas.h"
#include "layout/replicas.h"
#include "runtime/device.h"

namespace moe::runtime {

/// Replicas whose tables kernels read, too. Dispatches of one buffer use them one after the other.
struct DeviceReplicas : layout::Replicas {
  std::shared_ptr<std::byte> memory;  ///< memory that `kernels` points to
  kernels::Replicas kernels;

  /// Fills device memory that no kernel has been told of, from page-locked memory.
  using Upload = std::function<void(std::byte* target, const std::byte* source, int64_t bytes)>;

  /// @param num_slots  slots of all ranks
  static std::shared_ptr<const DeviceReplicas> make(const layout::Replicas& replicas,
                                                    int num_slots,
                                                    Device& device,
                                                    const Upload& upload);
  static int64_t memory_bytes(int num_ranks, int num_slots);
};

}  // namespace moe::runtime
