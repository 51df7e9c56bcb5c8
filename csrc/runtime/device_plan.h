#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/buffer.h"
#include "ops/plan.h"
#include "runtime/device_endpoint.h"

namespace moe::runtime {

/// Contents of an operation's memory before kernels write it. They write all of it, unless they
/// leave; a run of a graph that leaves tells nobody but by the plan's status, so that what else can
/// be read is zero, or of a run whose result has as many rows.
enum class Contents { kUnset, kCaptured };

/// A plan whose slots lie in device memory. Immutable once the kernels that write it have run.
struct DevicePlan : ops::PlanHeader {
  std::shared_ptr<std::byte> memory;  ///< owner of the rest
  int64_t* slots = nullptr;           ///< device [num_tokens, num_slots]
  int64_t* topk_idx = nullptr;        ///< device [num_tokens, num_topk], a private copy
  int32_t* device_counts = nullptr;   ///< device, the count matrix
  /// device [2]: Tables::status of the captured dispatch that made the plan, whose counts the host
  /// does not know; null for any other.
  std::shared_ptr<int32_t> status;

  /// An empty plan with room for so many choices. The header is of the caller's making.
  /// @param num_rows  Of the result, where it is captured.
  static std::shared_ptr<DevicePlan> allocate(DeviceEndpoint& endpoint,
                                              layout::RowLayout layout,
                                              int64_t num_tokens,
                                              int64_t num_topk,
                                              Contents contents,
                                              int64_t num_rows = 0);
  /// Bytes of the memory of such a plan.
  static int64_t memory_bytes(const DeviceEndpoint& endpoint,
                              layout::RowLayout layout,
                              int64_t num_tokens,
                              int64_t num_topk) {
    return DevicePlan().lay(Suballocator(nullptr), endpoint, layout, num_tokens, num_topk);
  }

 private:
  int64_t lay(Suballocator suballocator,
              const DeviceEndpoint& endpoint,
              layout::RowLayout layout,
              int64_t num_tokens,
              int64_t num_topk);
};

/// Fault of the dispatch of a handle that its caller got nevertheless, "" for
/// nothing: such a plan has neither counts nor slots. By an operation, once it has heard the ones
/// before.
std::string find_failure(const ops::PlanHeader& plan);

/// Findings of a dispatch besides its plan, in device memory.
struct DispatchTables {
  std::shared_ptr<std::byte> memory;
  kernels::Tables tables;  ///< all of them

  /// @param counts  Device memory for the count matrix, or null for some of its own.
  /// @param num_rows  Of the result, where it is captured.
  static DispatchTables allocate(DeviceEndpoint& endpoint,
                                 int32_t* counts,
                                 Contents contents,
                                 int64_t num_rows = 0);
  /// Bytes of the memory of such tables.
  static int64_t memory_bytes(const DeviceEndpoint& endpoint, const int32_t* counts) {
    return DispatchTables().lay(Suballocator(nullptr), endpoint, counts);
  }

 private:
  int64_t lay(Suballocator suballocator, const DeviceEndpoint& endpoint, const int32_t* counts);
};

/// The plan of a dispatch from its count matrix and this rank's choices, as ops::Plan::make().
std::shared_ptr<DevicePlan> import_plan(DeviceEndpoint& endpoint, const ops::Plan& plan);

/// The plan's slots and choices, in host memory.
ops::Plan export_plan(DeviceEndpoint& endpoint, const DevicePlan& plan);

}  // namespace moe::runtime
