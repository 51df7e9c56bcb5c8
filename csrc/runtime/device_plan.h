#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernels/exchange.h"
#include "ops/plan.h"
#include "runtime/device.h"
#include "runtime/device_memory.h"

namespace moe::runtime {

/// Takes so many bytes of device memory.
using TakeMemory = std::function<std::shared_ptr<std::byte>(int64_t bytes)>;

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
  static std::shared_ptr<DevicePlan> allocate(const kernels::Buffer& buffer,
                                              layout::RowLayout layout,
                                              int64_t num_tokens,
                                              int64_t num_topk,
                                              const TakeMemory& take);
  /// Bytes of the memory of such a plan.
  static int64_t memory_bytes(const kernels::Buffer& buffer,
                              layout::RowLayout layout,
                              int64_t num_tokens,
                              int64_t num_topk) {
    return DevicePlan().lay(Suballocator(nullptr), buffer, layout, num_tokens, num_topk);
  }

 private:
  int64_t lay(Suballocator suballocator,
              const kernels::Buffer& buffer,
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

  /// @param shared  Tables of the buffer, for the rest.
  /// @param counts  Device memory for the count matrix, or null for some of its own.
  static DispatchTables allocate(const kernels::Buffer& buffer,
                                 const kernels::Tables& shared,
                                 int32_t* counts,
                                 const TakeMemory& take);
  /// Bytes of the memory of such tables.
  static int64_t memory_bytes(const kernels::Buffer& buffer, const int32_t* counts) {
    return DispatchTables().lay(Suballocator(nullptr), buffer, counts);
  }

 private:
  int64_t lay(Suballocator suballocator, const kernels::Buffer& buffer, const int32_t* counts);
};

/// Cuts the tokens of @p choices into chunks, in which an uncached dispatch counts them.
/// @param tokens_per_chunk  Least number of tokens of a chunk.
void cut_chunks(int tokens_per_chunk, kernels::Choices* choices);

/// Lays what counting takes at @p memory, null to measure it. @return its bytes.
int64_t lay_chunks(std::byte* memory,
                   const kernels::Buffer& buffer,
                   kernels::Choices* choices,
                   kernels::TokenSets* sets);

/// Bytes of that memory for so many choices, whatever their layout.
int64_t chunk_bytes(const kernels::Buffer& buffer,
                    int tokens_per_chunk,
                    int64_t num_tokens,
                    int64_t num_topk,
                    kernels::TokenSets sets);

/// The plan of a dispatch from its count matrix and this rank's choices, as ops::Plan::make().
/// @param stream  Stream of the buffer; it is drained.
std::shared_ptr<DevicePlan> import_plan(const kernels::Buffer& buffer,
                                        Device& device,
                                        Stream& stream,
                                        const ops::Plan& plan);

/// The plan's slots and choices, in host memory.
ops::Plan export_plan(Device& device, Stream& stream, const DevicePlan& plan);

}  // namespace moe::runtime
